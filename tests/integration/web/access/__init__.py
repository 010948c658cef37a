"""Who may use the web server, and how it protects its host."""
