"""Which geometry shifts, rotations and deformations have, and whether training in it helps."""
