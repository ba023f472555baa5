"""Which geometry natural variations have, and whether training in it helps."""
