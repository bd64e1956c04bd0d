"""Networks, machines that come and go, step times, members that lie."""
