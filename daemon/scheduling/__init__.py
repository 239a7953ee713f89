"""Which tokens the next step computes, who is let in, and who gives way. No socket, no clock, no device."""
