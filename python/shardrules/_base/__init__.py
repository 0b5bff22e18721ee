"""Values, checks, texts and files that all floors share."""
