"""Lua scripts of the Redis back end, each atomic, for Redis 6.2 and later.

They name all their keys, which lie in one cluster slot, and use no command newer than 6.2. They
call TIME before they write: since Redis 5 a script is replicated by its effects, so replicas and
the append-only file see the same ids (https://redis.io/docs/latest/develop/programmability/eval-intro/).

A server that was killed in the middle of a write cuts its append-only file behind the last whole
*command*, be it inside of a transaction. What is left of that, and was never acknowledged, it runs
at the start after the next one, with what was written meanwhile (valkey pull request 4342). So a
script writes in an order in which every beginning of it is harmless, or leaves a mark of what is to
be taken back.

Ids that readers go by (events, versions, cursors) are the server's clock, or one more than the last
if that is greater: a server that lost its last second in a crash gives none of them out again. A
last one that is no number counts as 0, so garbage in its place stops no writer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Script:
    """A Lua script and the digest by which the server knows it."""

    text: str
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        # Not for secrecy: EVALSHA names scripts so.
        digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "digest", digest)


# What a decision rests on, with the time by the one clock that all share.
# KEYS: state. Returns TIME, the id of this start of the server, and the fields of state.
LOOK = Script("""
local start = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
return {redis.call('TIME'), start, redis.call('HGETALL', KEYS[1])}
""")

# Writes that belong together, made only if nothing was decided since the caller looked.
# KEYS: state, events, receipt, then the keys that the writes name.
# ARGV: 1 the revision that the caller saw, '' if its writes rest on nothing; 2 id of this change;
#   3 time of its events, '' for the server's; 4 whether readers wait for it; 5 their channel;
#   6 number of events, then kind and detail of each; then the writes, each as its command, the
#   number of its key, how many words follow, and these: those before the state, then those after.
#   6 is followed by the number of words for the state, and these; then where those after begin.
# Order: what the state refers to, events, the state in one command, then what is removed. Without
# the state nothing was changed; with it all was, and what is left over is never referred to.
# Returns 'lost', or 'made' with the ids of the events. The receipt holds that answer for a caller
# whose connection broke: it asks again with the same id, and nothing is done twice.
CHANGE = Script("""
local state, events, receipt = KEYS[1], KEYS[2], KEYS[3]
local answered = redis.call('GET', receipt)
if answered then return answered end
local guard, id = ARGV[1], ARGV[2]
if guard ~= '' then
  if (redis.call('HGET', state, 'revision') or 'none') ~= guard then return 'lost' end
end
local clock = redis.call('TIME')
local now_ms = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)
local function last(name)
  local number = tonumber(redis.call('HGET', state, name)) or 0
  return math.abs(number) < 2^53 and number or 0
end
local time = ARGV[3]
if time == '' then time = string.format('%s.%06d', clock[1], tonumber(clock[2])) end
local function write(at, past)
  while at < past do
    local after = at + 3 + tonumber(ARGV[at + 2])
    redis.call(ARGV[at], KEYS[tonumber(ARGV[at + 1])], unpack(ARGV, at + 3, after - 1))
    at = after
  end
end
local first_event = 7
local num_words = first_event + 2 * tonumber(ARGV[6])
local after_words = num_words + 1 + tonumber(ARGV[num_words])
local removals = tonumber(ARGV[after_words])
write(after_words + 1, removals)
local new = {unpack(ARGV, num_words + 1, after_words - 1)}
local function set(name, text)
  table.insert(new, name)
  table.insert(new, text)
end
local answer, event = 'made', last('last_event')
for at = first_event, num_words - 1, 2 do
  event = math.max(event + 1, now_ms)
  local text = string.format('%.0f', event)
  redis.call('XADD', events, text .. '-0', 'time', time, 'kind', ARGV[at], 'detail', ARGV[at + 1])
  answer = answer .. ' ' .. text
end
if ARGV[6] ~= '0' then set('last_event', string.format('%.0f', event)) end
if guard ~= '' then set('revision', id) end
local version = string.format('%.0f', math.max(last('version') + 1, now_ms))
if ARGV[4] == '1' then set('version', version) end
if #new > 0 then redis.call('HSET', state, unpack(new)) end
write(removals, #ARGV + 1)
redis.call('SET', receipt, answer, 'EX', 120)
if ARGV[4] == '1' then redis.call('PUBLISH', ARGV[5], version) end
return answer
""")

# A batch of samples: those that are new, each with a cursor of its own.
# KEYS: state, names of runs, then samples, times and seen of each run in the batch.
# ARGV: most samples to keep of a run, number of runs, their names; then for each sample the number
#   of its run, rank, sequence, time, record.
# Returns how many were new.
#
# What was seen of a rank is kept as its count and the spans of sequences, "5 0:2 4:5". Sequences
# arrive in order but for what was dropped or waits in a spool, so there are few spans. Of more than
# 256, the gap between the oldest two is closed: what is missing there is taken for lost for good.
#
# Before its samples a batch writes a mark into "seen": its first and last cursor in the run, and
# what is seen of its ranks once it is whole. The next batch removes it, if the server knows of it;
# not so that of a torn batch, which the server runs later: REPAIR finds it, and forgets its samples
# unless they count as seen. They were never acknowledged, so their sender has them. All writers of
# a run leave marks: one that does not would make those of the others look torn.
APPEND = Script("""
local most, num_runs = tonumber(ARGV[1]), tonumber(ARGV[2])
local clock = redis.call('TIME')
local now_us = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local last_cursor = tonumber(redis.call('HGET', KEYS[1], 'last_cursor')) or 0
local cursor = math.max(math.abs(last_cursor) < 2^53 and last_cursor or 0, now_us - 1)
local function load(key, rank)
  local seen = {count = 0, spans = {}, key = key, rank = rank}
  local text = redis.call('HGET', key, rank)
  if text then
    seen.count = tonumber(string.match(text, '^%d+') or '0')
    for first, last in string.gmatch(text, '(%-?%d+):(%-?%d+)') do
      table.insert(seen.spans, {tonumber(first), tonumber(last)})
    end
  end
  return seen
end
local function add(seen, n)
  local spans = seen.spans
  local at = #spans
  while at > 0 and spans[at][1] > n do at = at - 1 end
  local before, after = spans[at], spans[at + 1]
  if before and n <= before[2] then return false end
  local joins_before = before and before[2] == n - 1
  local joins_after = after and after[1] == n + 1
  if joins_before and joins_after then
    before[2] = after[2]
    table.remove(spans, at + 1)
  elseif joins_before then before[2] = n
  elseif joins_after then after[1] = n
  else table.insert(spans, at + 1, {n, n}) end
  if #spans > 256 then
    spans[1][2] = spans[2][2]
    table.remove(spans, 2)
  end
  seen.count = seen.count + 1
  return true
end
local of_rank, new, writes, spans_of_run = {}, 0, {}, {}
for at = 3 + num_runs, #ARGV, 5 do
  local base = 3 * tonumber(ARGV[at])
  local rank = ARGV[at + 1]
  local name = ARGV[at] .. ' ' .. rank
  local seen = of_rank[name] or load(KEYS[base + 2], rank)
  of_rank[name] = seen
  if add(seen, tonumber(ARGV[at + 2])) then
    cursor = cursor + 1
    new = new + 1
    local text = string.format('%.0f', cursor)
    table.insert(writes, {base, at, text})
    local span = spans_of_run[KEYS[base + 2]] or {text, text}
    spans_of_run[KEYS[base + 2]] = {span[1], text}
    seen.is_changed = true
  end
end
for run = 1, num_runs do redis.call('SADD', KEYS[2], ARGV[2 + run]) end
local words_of_run = {}
for _, seen in pairs(of_rank) do
  if seen.is_changed then
    local parts = {string.format('%.0f', seen.count)}
    for _, span in ipairs(seen.spans) do
      table.insert(parts, string.format('%.0f:%.0f', span[1], span[2]))
    end
    local words = words_of_run[seen.key] or {}
    words_of_run[seen.key] = words
    table.insert(words, seen.rank)
    table.insert(words, table.concat(parts, ' '))
  end
end
for key, span in pairs(spans_of_run) do
  local mark, before = 'mark ' .. span[1], redis.call('HGET', key, 'newest mark')
  local value = cmsgpack.pack({span[1], span[2], words_of_run[key]})
  redis.call('HSET', key, mark, value, 'newest mark', mark)
  if before then redis.call('HDEL', key, before) end
end
for _, one in ipairs(writes) do
  local base, at, text = one[1], one[2], one[3]
  redis.call('XADD', KEYS[base], text .. '-0', 's', ARGV[at + 4])
  redis.call('ZADD', KEYS[base + 1], ARGV[at + 3], text)
end
for key, words in pairs(words_of_run) do redis.call('HSET', key, unpack(words)) end
if new > 0 then redis.call('HSET', KEYS[1], 'last_cursor', string.format('%.0f', cursor)) end
for run = 1, num_runs do
  local samples, times = KEYS[3 * run], KEYS[3 * run + 1]
  local over = redis.call('ZCARD', times) - most
  if over > 0 then
    local oldest = redis.call('ZPOPMIN', times, over)
    for at = 1, #oldest, 2 do redis.call('XDEL', samples, oldest[at] .. '-0') end
  end
end
return new
""")

# KEYS: samples, times and seen of one run. Returns how many samples of torn batches were forgotten.
REPAIR = Script("""
local found, forgotten = redis.call('HGETALL', KEYS[3]), 0
local newest = redis.call('HGET', KEYS[3], 'newest mark')
for at = 1, #found, 2 do
  if string.sub(found[at], 1, 5) == 'mark ' then
    local is_mark, mark = pcall(cmsgpack.unpack, found[at + 1])
    is_mark = is_mark and type(mark) == 'table' and type(mark[3]) == 'table'
    local first, last, words = unpack(is_mark and mark or {'0', '0', {}})
    local is_seen = true
    for n = 1, #words, 2 do
      is_seen = is_seen and redis.call('HGET', KEYS[3], words[n]) == words[n + 1]
    end
    if not is_seen then
      for _, entry in ipairs(redis.call('XRANGE', KEYS[1], first .. '-0', last .. '-0')) do
        redis.call('ZREM', KEYS[2], string.match(entry[1], '^%d+'))
        forgotten = forgotten + redis.call('XDEL', KEYS[1], entry[1])
      end
    end
    local is_kept = is_mark and is_seen and found[at] == newest
    if not is_kept then redis.call('HDEL', KEYS[3], found[at]) end
  end
end
return forgotten
""")

# Samples of one run from before a time, the oldest first, some at a time.
# KEYS: names of runs, samples, times. ARGV: the run, the time, most to forget at once.
# Returns how many were forgotten.
PRUNE_SAMPLES = Script("""
local old = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', '(' .. ARGV[2], 'LIMIT', 0, ARGV[3])
for _, cursor in ipairs(old) do
  redis.call('XDEL', KEYS[2], cursor .. '-0')
  redis.call('ZREM', KEYS[3], cursor)
end
if redis.call('EXISTS', KEYS[3]) == 0 then
  redis.call('DEL', KEYS[2])
  redis.call('SREM', KEYS[1], ARGV[1])
end
return #old
""")

# KEYS: records and orders of an ordered table. ARGV: the greatest order to go, as a bound of
# ZRANGEBYSCORE; most to remove at once. Returns how many were removed.
PRUNE = Script("""
local old = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
for _, key in ipairs(old) do
  redis.call('HDEL', KEYS[1], key)
  redis.call('ZREM', KEYS[2], key)
end
return #old
""")
