-- Executions and their ends.

-- An older life of the same transactional producer: its owner lost the partition and may not know it yet.
local function older(fence, than)
  local producer, epoch = string.match(fence, '^(%d+)%.(%d+)$')
  local other, other_epoch = string.match(than or '', '^(%d+)%.(%d+)$')
  return producer == other and tonumber(epoch) < tonumber(other_epoch)
end

-- begin: one more execution of a job, at its one place in the log.
-- ARGS: job, request coordinates, fence `<producer id>.<epoch>`.
-- -> begun attempt crashes remaining_ms | cancelled attempt | elsewhere coordinates | fenced | ended | unknown | closed
local function begin(keys, args)
  local member = member_of(args[1])
  if not open_gate(keys) then return {'closed', member} end
  local request, fence = word(args[2], 'request'), word(args[3], 'fence', 64)
  refuse_unless(string.match(fence, '^%d+%.%d+$'), 'fence')
  local row = redis.call('HMGET', keys[5], 'kind', 'ended', 'request', 'fence', 'attempt', 'crashes', 'running',
    'cancelled', 'expires_ms', 'restored')
  if row[1] == 'settled' or row[2] == '1' then return {'ended', member} end
  if row[1] ~= 'admitted' then return {'unknown', member} end
  if row[3] and row[3] ~= request then return {'elsewhere', member, row[3]} end
  if older(fence, row[4]) then return {'fenced', member} end
  -- A rebuild knows the attempts that wrote `Started`; one that had just begun may have been lost with the old ledger.
  local attempt = tonumber(row[5] or '0') + 1 + tonumber(row[10] or '0')
  -- The same life of the same producer did not crash: its last begin was answered into the void.
  local crashed = row[7] == '1' and row[4] ~= fence
  local crashes = tonumber(row[6] or '0') + (crashed and 1 or 0)
  redis.call('HSET', keys[5], 'request', request, 'fence', fence, 'attempt', text(attempt), 'crashes', text(crashes),
    'running', '1')
  redis.call('HDEL', keys[5], 'restored')
  if row[8] == '1' then return {'cancelled', member, text(attempt)} end
  local remaining_ms = math.max(0, tonumber(row[9]) - math.floor(now_us() / 1000))
  return {'begun', member, text(attempt), text(crashes), text(remaining_ms)}
end

-- hand_over: an execution ended in order; the next begin counts no crash.
-- ARGS: job, request coordinates, attempt. -> noted | stale | closed
local function hand_over(keys, args)
  local member = member_of(args[1])
  if not open_gate(keys) then return {'closed', member} end
  local request, attempt = word(args[2], 'request'), integer(args[3], 'attempt')
  local row = redis.call('HMGET', keys[5], 'request', 'attempt', 'running')
  if row[1] ~= request or row[2] ~= text(attempt) or row[3] ~= '1' then return {'stale', member} end
  redis.call('HDEL', keys[5], 'running')
  return {'noted', member}
end

-- cancel: flag an unfinished job, or remember the cancellation of one that has not arrived.
-- ARGS: job, memory_ms. -> flagged decision ingress | remembered | ended | closed
local function cancel(keys, args)
  local member = member_of(args[1])
  if not open_gate(keys) then return {'closed', member} end
  local memory_ms = integer(args[2], 'memory_ms')
  local row = redis.call('HMGET', keys[5], 'kind', 'ended', 'decision', 'ingress')
  if row[1] == 'admitted' and row[2] ~= '1' then
    redis.call('HSET', keys[5], 'cancelled', '1')
    return {'flagged', member, row[3], row[4]}
  end
  if row[1] and row[1] ~= 'cancelled' then return {'ended', member} end
  if not row[1] then
    local forget_ms = text(math.floor(now_us() / 1000) + memory_ms)
    redis.call('HSET', keys[5], 'kind', 'cancelled', 'forget_ms', forget_ms)
    forget_later(keys[5], forget_ms)
  end
  return {'remembered', member}
end

-- settle: end the lease of the job that came from `ingress`, and count what it used. What only an execution needs is
-- forgotten. ARGS: job, ingress, prompt_tokens, completion_tokens, load_ms, memory_ms. -> settled repeated(0|1) | closed
local function settle(keys, args)
  local member = member_of(args[1])
  if not open_gate(keys) then return {'closed', member} end
  local ingress, memory_ms = word(args[2], 'ingress'), integer(args[6], 'memory_ms')
  local prompt, output = integer(args[3], 'prompt_tokens'), integer(args[4], 'completion_tokens')
  local load_ms, now = integer(args[5], 'load_ms'), now_us()
  local row = redis.call('HMGET', keys[5], 'kind', 'ended', 'ingress', 'reserve', 'weight', 'lift')
  if row[1] == 'admitted' then
    -- Another ingress: the usage of an earlier job of this id, which the ledger has forgotten.
    if row[2] == '1' or row[3] ~= ingress then return {'settled', member, '1'} end
    local cost = tonumber(row[6] or '0') + cost_of(prompt, output, load_ms, tonumber(row[5] or '100'))
    correct(member, keys[5], math.min(tonumber(row[4] or '0'), prompt + output), cost, now)
    redis.call('HSET', keys[5], 'ended', '1')
    redis.call('HDEL', keys[5], 'attempt', 'crashes', 'running', 'request', 'fence', 'restored', 'cancelled')
    release(keys, member, keys[5])
    return {'settled', member, '0'}
  end
  if row[1] == 'settled' or row[1] == 'refused' then return {'settled', member, '1'} end
  -- Admitted and finished around a loss of the ledger: remembered, so that a late copy does not begin.
  local forget_ms = text(math.floor(now / 1000) + memory_ms)
  redis.call('HSET', keys[5], 'kind', 'settled', 'ingress', ingress, 'forget_ms', forget_ms)
  forget_later(keys[5], forget_ms)
  return {'settled', member, '0'}
end

