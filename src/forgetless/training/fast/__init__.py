"""Faster ways to take the same training steps; the loop works without them."""
