"""Plans for people: tables of text, tables in notebooks, HTML reports."""
