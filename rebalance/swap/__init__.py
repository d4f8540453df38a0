"""Phase 3, staging slots to live slots: swap, weight update, scrubber."""
