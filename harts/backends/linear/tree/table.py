"""Columns of the two int64 tables that the state kernels read.

A sequence is a list of spans: SPANS_BEGIN:SPANS_END in the table of spans. A span is a run of chunks that lie in one
buffer, rows ROW:END, chunks from CHUNK on; the state after it goes to slot SLOT of the bank (-1: nowhere). SOURCE is
the slot that the sequence starts from (-1: the zero state), and PLACE where it leaves the gradient of that state:
places follow slots, so that the consumers of a slot lie side by side. Rows of the table of sequences are in launch
order.
"""

SPANS_BEGIN, SPANS_END, SOURCE, PLACE = range(4)
SEQUENCE_COLUMNS = 4

IN_HEAD, ROW, END, CHUNK, SLOT = range(5)
SPAN_COLUMNS = 5
