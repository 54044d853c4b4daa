"""What any HTTP application of this package needs. Knows no engine, and of the APIs only the shapes of errors."""
