"""Training scripts without a Session, in forms that people write. Nothing imports or runs them."""
