"""How good is a green check? Slips that a user could make, in real rules for real models."""
