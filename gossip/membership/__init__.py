"""Who is there: SWIM with Lifeguard, signed records, push-pull."""
