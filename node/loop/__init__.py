"""The training thread of a node: its loop, its run, and the ranks that train one model together."""
