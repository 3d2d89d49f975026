"""What we measure, and the peers we measure beside. Never imported by the product."""
