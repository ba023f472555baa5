"""The search over eta, radius and mass on validation images, shared by any number of workers."""
