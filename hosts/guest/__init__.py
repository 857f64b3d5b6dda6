"""What runs inside a guest, and how it is built. Imports no Django."""
