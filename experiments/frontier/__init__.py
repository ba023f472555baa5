"""Clean against robust error of every family: rows, comparisons, questions, and the page that shows them."""
