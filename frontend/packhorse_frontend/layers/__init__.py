"""What surrounds every route."""
