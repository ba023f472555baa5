"""The page and the tables of one study, from its run folders alone."""
