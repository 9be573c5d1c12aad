"""What tokens leave behind: one file a kind of layer state, chains of pieces, the resident state over all layers."""
