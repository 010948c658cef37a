"""The devices of the stand-in."""
