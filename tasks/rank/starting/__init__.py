"""How the process of a rank starts, and what ends it with its descendants."""
