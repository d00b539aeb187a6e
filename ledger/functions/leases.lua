-- Leases: taken whole, ended whole.

local function tenant_of(member)
  return string.match(member, '^[^/]+')
end

local function drop(key, field)
  if redis.call('HINCRBY', key, field, -1) <= 0 then redis.call('HDEL', key, field) end
end

local function fields_of(tenant, window, digest)
  return 't|' .. tenant, 'a|' .. tenant .. '|' .. digest, 'w|' .. window, 'p|' .. window .. '|' .. tenant, 'r|' .. digest
end

local function take(keys, member, lease, window, digest)
  redis.call('ZADD', keys[2], lease, member)
  for _, field in ipairs({fields_of(tenant_of(member), window, digest)}) do redis.call('HINCRBY', keys[3], field, 1) end
end

-- Forget a row when it is no longer of use. One that holds a lease has no end: what it holds must be found again.
local function forget_later(row_key, forget_ms)
  redis.call('PEXPIREAT', row_key, forget_ms)
end

-- End a lease: place, concurrency and reference together.
local function release(keys, member, row_key)
  redis.call('ZREM', keys[2], member)
  local row = redis.call('HMGET', row_key, 'held', 'window', 'digest', 'forget_ms')
  if row[1] ~= '1' then return end
  redis.call('HDEL', row_key, 'held')
  for _, field in ipairs({fields_of(tenant_of(member), row[2], row[3])}) do drop(keys[3], field) end
  forget_later(row_key, row[4])
end

-- Count other tokens and another cost for a job than until now.
local function correct(member, row_key, tokens, cost, now)
  local row = redis.call('HMGET', row_key, 'admitted_us', 'tokens', 'cost')
  spend(tenant_of(member), tonumber(row[1]), tokens - tonumber(row[2] or '0'), cost - tonumber(row[3] or '0'), now)
  for field, value in pairs({tokens = tokens, cost = cost}) do
    if value == 0 then redis.call('HDEL', row_key, field) else redis.call('HSET', row_key, field, text(value)) end
  end
end

-- End the leases whose time is over, at most `count_max` of them: what is left counts as held, never the reverse.
-- One that never began has used nothing; of one that began, usage will say what it used.
local function sweep(keys, now, count_max)
  local over = redis.call('ZRANGE', keys[2], '-inf', text(now), 'BYSCORE', 'LIMIT', 0, count_max)
  for _, member in ipairs(over) do
    local row_key = ROW_PREFIX .. member
    local row = redis.call('HMGET', row_key, 'held', 'attempt', 'lift')
    if row[1] == '1' and not row[2] then correct(member, row_key, 0, tonumber(row[3] or '0'), now) end
    release(keys, member, row_key)
  end
end

-- What an earlier call decided on a job; nil when nothing did.
local function remembered(row_key, member, body)
  local row = redis.call('HMGET', row_key, 'kind', 'body', 'ingress', 'decision', 'admitted_us', 'lease_us', 'epoch',
    'reason', 'message', 'lift')
  local kind = row[1]
  if not kind then return nil end
  if kind == 'cancelled' then return {'taken_back', member} end
  if kind == 'settled' then return {'ended', member} end
  if row[2] ~= body then return {'differs', member} end
  if kind == 'refused' then return {'refused', member, row[8], row[9], row[3]} end
  return {'granted', member, row[4], row[3], row[5], row[6], row[7], row[10] or '0'}
end

-- Places held for single tenants, as `tenant=places` with spaces between.
local function reserved_of(argument)
  local reserved = {}
  refuse_unless(argument and #argument <= DECISION_BYTES_MAX, 'reserved')
  for tenant, places in string.gmatch(argument, '(%S+)=(%d+)') do reserved[tenant] = tonumber(places) end
  return reserved
end

local NUMBERS = {'interactive', 'concurrency_max', 'adapter_concurrency_max', 'tokens_per_minute', 'tokens_per_day',
  'window_max', 'prompt', 'output', 'weight', 'expires_ms', 'grace_ms', 'memory_ms', 'retry_after_ms', 'sweep_max'}

-- ARGS of admit as names, all of them checked.
local function asked(args)
  local member = member_of(args[1])
  local ask = {
    member = member, tenant = tenant_of(member), body = word(args[2], 'body hash'), ingress = word(args[3], 'ingress'),
    digest = word(args[4], 'digest'), window = word(args[5], 'window'),
    decision = word(args[7], 'decision', DECISION_BYTES_MAX), reserved = reserved_of(args[8]),
  }
  local next_number = string.gmatch(word(args[6], 'numbers'), '%S+')
  for _, name in ipairs(NUMBERS) do ask[name] = integer(next_number(), name) end
  refuse_unless(ask.interactive <= 1, 'interactive')
  ask.interactive = ask.interactive == 1
  refuse_unless(#ask.tenant <= 40, 'tenant')
  refuse_unless(ask.weight >= 1 and ask.weight <= 1000, 'weight')
  ask.reserve = ask.prompt + ask.output
  refuse_unless(ask.reserve <= INTEGER_MAX / 1000, 'tokens')
  ask.lease_us = (ask.expires_ms + ask.grace_ms) * 1000
  refuse_unless(ask.lease_us <= INTEGER_MAX, 'expires_ms')
  return ask
end

local function refuse_for_now(keys, ask, resource, wait_ms)
  if ask.interactive then
    redis.call('SET', keys[6], resource .. ' ' .. text(wait_ms), 'PX', text(ask.memory_ms))
  end
  return {'full', ask.member, resource, text(wait_ms)}
end

local function lease(keys, ask, lift, epoch, now)
  local cost = lift + cost_of(ask.prompt, ask.output, 0, ask.weight)
  local lease_us = text(ask.lease_us)
  redis.call('HSET', keys[5], 'kind', 'admitted', 'body', ask.body, 'ingress', ask.ingress, 'decision', ask.decision,
    'digest', ask.digest, 'window', ask.window, 'expires_ms', text(ask.expires_ms), 'lease_us', lease_us,
    'admitted_us', text(now), 'epoch', epoch, 'held', '1', 'reserve', text(ask.reserve), 'weight', text(ask.weight),
    'tokens', text(ask.reserve), 'cost', text(cost), 'forget_ms', text(math.floor(now / 1000) + ask.memory_ms))
  if lift > 0 then redis.call('HSET', keys[5], 'lift', text(lift)) end
  take(keys, ask.member, lease_us, ask.window, ask.digest)
  redis.call('ZADD', keys[4], 'GT', text(now), ask.tenant)
  spend(ask.tenant, now, ask.reserve, cost, now)
  redis.call('PEXPIRE', SPENT_PREFIX .. ask.tenant, text(SPENT_MS))
  return {'leased', ask.member, text(now), lease_us, epoch, text(lift)}
end

-- admit: a lease, whole or not at all. KEYS[6]: the memory of a capacity refusal of this ingress record.
-- ARGS: job, body hash, ingress, digest, window, numbers, decision, reserved. All that is a number, in the order of
--   NUMBERS, is one argument with spaces between: a client takes as long over twenty short arguments as over the call.
-- -> leased admitted_us lease_us epoch lift | granted decision ingress admitted_us lease_us epoch lift, as an earlier
--   call was | refused reason message ingress | differs | taken_back | ended | full resource retry_after_ms | expired
--   | closed
local function admit(keys, args)
  local found = open_gate(keys)
  if not found then return {'closed', member_of(args[1])} end
  local ask, now = asked(args), now_us()
  local answer = remembered(keys[5], ask.member, ask.body)
  if answer then return answer end
  local refusal = redis.call('GET', keys[6])
  if refusal then
    local resource, wait_ms = string.match(refusal, '^(%l+) (%d+)$')
    return {'full', ask.member, resource, wait_ms}
  end
  if now >= ask.expires_ms * 1000 then return {'expired', ask.member} end

  sweep(keys, now, ask.sweep_max)
  local stored = redis.call('HMGET', keys[3], fields_of(ask.tenant, ask.window, ask.digest))
  local counts = {tenant = tonumber(stored[1] or '0'), adapter = tonumber(stored[2] or '0'),
    window = tonumber(stored[3] or '0')}
  local spent = spent_of(ask.tenant, now)
  local limit, wait_ms = at_own_limit(ask, counts, spent, now)
  if limit then return refuse_for_now(keys, ask, limit, wait_ms) end
  if ask.window_max == 0 then return refuse_for_now(keys, ask, 'window', ask.retry_after_ms) end
  ask_for_place(ask, now)
  local problem = no_place(keys, ask, counts, spent.counter, now)
  if problem then
    wait_for_place(ask, now)
    return refuse_for_now(keys, ask, problem, ask.retry_after_ms)
  end
  redis.call('ZREM', WAITING_PREFIX .. ask.window, ask.tenant)
  if #spent.old > 0 then redis.call('HDEL', SPENT_PREFIX .. ask.tenant, unpack(spent.old)) end
  return lease(keys, ask, lift_of(keys, ask.tenant, counts.tenant, spent.counter, now), found.epoch, now)
end

-- refuse: remember a permanent refusal, unless something is remembered already.
-- ARGS: job, body hash, ingress, reason, message, memory_ms. -> as admit, without leased, full and expired
local function refuse(keys, args)
  local member = member_of(args[1])
  if not open_gate(keys) then return {'closed', member} end
  local body, ingress = word(args[2], 'body hash'), word(args[3], 'ingress')
  local reason, memory_ms = word(args[4], 'reason'), integer(args[6], 'memory_ms')
  refuse_unless(args[5] and #args[5] <= TEXT_BYTES_MAX and memory_ms > 0, 'message or memory_ms')
  local answer = remembered(keys[5], member, body)
  if answer then return answer end
  local forget_ms = math.floor(now_us() / 1000) + memory_ms
  redis.call('HSET', keys[5], 'kind', 'refused', 'body', body, 'ingress', ingress, 'reason', reason,
    'message', args[5], 'forget_ms', text(forget_ms))
  forget_later(keys[5], text(forget_ms))
  return {'refused', member, reason, args[5], ingress}
end

