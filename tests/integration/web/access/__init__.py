"""Who may use the web server, and how it is kept from being used against its host."""
