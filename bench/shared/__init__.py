"""What several lines and programs use."""
