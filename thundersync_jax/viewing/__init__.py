"""What people look at: progress while a run goes, and its timeline afterwards."""
