"""Transport attacks of the literature beside the library's, with sizes in exact W1."""
