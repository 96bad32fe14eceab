"""What the adapters to other libraries share: reading their objects, and applying a result in them."""
