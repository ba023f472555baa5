"""What the fast way is made of: a step traced, differentiated once more, planned, compiled and replayed."""
