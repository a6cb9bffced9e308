"""Loss curves that the models must follow, and the loop that computed them."""
