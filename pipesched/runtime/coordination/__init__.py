"""How ranks meet, and notice that one of them fails."""
