"""Networks, links, churn and step times."""
