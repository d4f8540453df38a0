"""Just-in-time replicas: hot experts of one layer, pulled into spare slots for one batch.

    counts -> exchange -> split -> pieces --+-- slots -> dispatch -> resident experts --+
                                            |                                           v
                                            +-- pull records -> close the layer -> spare slots
                                                                                        |
                                                                             combine <--+

A second protocol beside the vote of migrations. The vote changes the committed placement between
steps. A pulled replica serves one layer of one batch: the committed placement, its generation and
the routing table never change. Off by default: a layer without ``pulls`` does none of it.

Rules, and what breaks without them (``benchmarks.pulls`` explores them, and breaks each one):

1. **A pull begins after the layer's exchange of counts.** The exchange of a rank follows the swap
   before its step in stream order. Without: a record is read before its rank swapped it.
2. **A source is a slot that serves the expert in the table of this step**, and has tokens of the
   batch. The table changes at the same step on all ranks, so it says what every peer's slot holds.
3. **A layer is closed before its results are sent.** A rank's part in the closing exchange follows
   its pulls; its combine follows the closing exchange. So no rank is past a layer of which a record
   is still read: whatever it writes next (a swap, new weights, staged bytes in a slot that a flip
   freed, which also waits until all ranks have applied it) overwrites nothing that is read. This
   holds for the last layer of a step too, after which no exchange of counts follows.
4. **The spare records are those of one layer at a time.** The next pull begins after the product
   that reads them. By rule 1 it does: a rank's next exchange follows that product in stream order.
5. **The spare product begins after the pull.** The product of the resident slots does not wait.
6. **All ranks decide alike, and say so.** Pieces are a function of the gathered counts, the table
   and the rule. Where ranks differ, tokens reach a spare slot with another expert; before pulls
   they could not. The closing exchange carries a digest of what every spare slot serves. If two
   differ, every rank raises ``RankError`` before it sends a result.
7. **Who misses the deadline says so.** Its tokens are under way, and no other rank has them. The
   closing exchange carries the failure, and every rank raises ``BrokenGroup``, as for a dead rank.
   A record of a dead rank stays readable on a host, while it is mapped; the exchanges of the layer
   break.
8. **Tokens count where they came from**: the rank that gives adds them to its slot's counter, and
   no rank counts its spare slots. Telemetry sees the load of the placement.
"""
