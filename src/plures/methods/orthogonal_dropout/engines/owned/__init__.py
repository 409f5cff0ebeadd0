"""The engine that multiplies only what is owned."""
