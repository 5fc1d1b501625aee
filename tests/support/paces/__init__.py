"""Steps that are made up, of ranks that become slow."""
