"""The paper's study at full scale: rows, its claims judged one by one, networks, and the page that shows them."""
