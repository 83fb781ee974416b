"""The network: one decoder made of mixers and feed-forwards, the families that shape it, its adapters and its files."""
