"""Fast ways to project out stored rows and to orthonormalise them."""
