-- Leases: taken whole, ended whole.

local function drop(key, field)
  if redis.call('HINCRBY', key, field, -1) <= 0 then redis.call('HDEL', key, field) end
end

local function fields_of(tenant, window, digest)
  return 't|' .. tenant, 'a|' .. tenant .. '|' .. digest, 'w|' .. window, 'p|' .. window .. '|' .. tenant, 'r|' .. digest
end

-- `next_us`: no lease ends before. Kept beside the counts, so that whoever reads them knows whether any has to be ended.
local function take(keys, member, lease, window, digest)
  redis.call('ZADD', keys[2], lease, member)
  for _, field in ipairs({fields_of(tenant_of(member), window, digest)}) do redis.call('HINCRBY', keys[3], field, 1) end
  local next_us = redis.call('HGET', keys[3], 'next_us')
  if not next_us or tonumber(lease) < tonumber(next_us) then redis.call('HSET', keys[3], 'next_us', lease) end
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
  local tenant = tenant_of(member)
  local sums = read_sums(tenant, now)
  count(sums, tonumber(row[1]), tokens - tonumber(row[2] or '0'), cost - tonumber(row[3] or '0'), now)
  write_sums(tenant, sums)
  for field, value in pairs({tokens = tokens, cost = cost}) do
    if value == 0 then redis.call('HDEL', row_key, field) else redis.call('HSET', row_key, field, value) end
  end
end

-- End the leases whose time is over, at most `count_max` of them: what is left counts as held, never the reverse.
-- One that never began has used nothing; of one that began, usage will say what it used.
local function sweep(keys, now, count_max)
  local next_us = redis.call('HGET', keys[3], 'next_us')
  if not next_us or now < tonumber(next_us) then return end
  local over = redis.call('ZRANGE', keys[2], '-inf', text(now), 'BYSCORE', 'LIMIT', 0, count_max)
  for _, member in ipairs(over) do
    local row_key = ROW_PREFIX .. member
    local row = redis.call('HMGET', row_key, 'held', 'attempt', 'lift')
    if row[1] == '1' and not row[2] then correct(member, row_key, 0, tonumber(row[3] or '0'), now) end
    release(keys, member, row_key)
  end
  local first = redis.call('ZRANGE', keys[2], 0, 0, 'WITHSCORES')
  if first[2] then redis.call('HSET', keys[3], 'next_us', first[2]) else redis.call('HDEL', keys[3], 'next_us') end
end

-- What an earlier call decided on a job; nil when nothing did.
local function remembered(row_key, member, body)
  local kind = redis.call('HGET', row_key, 'kind')
  if not kind then return nil end
  if kind == 'cancelled' then return {'taken_back', member} end
  if kind == 'settled' then return {'ended', member} end
  local row = redis.call('HMGET', row_key, 'body', 'ingress', 'decision', 'admitted_us', 'lease_us', 'epoch', 'reason',
    'message', 'lift')
  if row[1] ~= body then return {'differs', member} end
  if kind == 'refused' then return {'refused', member, row[7], row[8], row[2]} end
  return {'granted', member, row[3], row[2], row[4], row[5], row[6], row[9] or '0'}
end

-- Places held for single tenants, as `tenant=places` with spaces between; and how many they are.
local function reserved_of(argument)
  local reserved, sum = {}, 0
  refuse_unless(argument and #argument <= DECISION_BYTES_MAX, 'reserved')
  if argument == '' then return reserved, sum end
  for tenant, places in string.gmatch(argument, '(%S+)=(%d+)') do reserved[tenant] = tonumber(places) end
  for _, places in pairs(reserved) do sum = sum + places end
  return reserved, sum
end

local NUMBERS = {'interactive', 'concurrency_max', 'adapter_concurrency_max', 'tokens_per_minute', 'tokens_per_day',
  'window_max', 'prompt', 'output', 'weight', 'expires_ms', 'grace_ms', 'memory_ms', 'retry_after_ms', 'sweep_max'}
local NUMBERS_PATTERN = '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$'

-- Put the numbers of an admission under their names, all of them checked.
local function number_all(ask, argument)
  local found = {string.match(word(argument, 'numbers'), NUMBERS_PATTERN)}
  if #found ~= #NUMBERS then
    local next_number = string.gmatch(argument, '%S+')
    for _, name in ipairs(NUMBERS) do integer(next_number(), name) end
    refuse_unless(false, 'numbers')
  end
  for i, name in ipairs(NUMBERS) do
    local number = tonumber(found[i])
    refuse_unless(number <= INTEGER_MAX, name)
    ask[name] = number
  end
end

-- ARGS of admit as names, all of them checked.
local function asked(args)
  local member = member_of(args[1])
  local ask = {
    member = member, tenant = tenant_of(member), body = word(args[2], 'body hash'), ingress = word(args[3], 'ingress'),
    digest = word(args[4], 'digest'), window = word(args[5], 'window'),
    decision = word(args[7], 'decision', DECISION_BYTES_MAX),
  }
  ask.reserved, ask.reserved_sum = reserved_of(args[8])
  number_all(ask, args[6])
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
  if ask.interactive then redis.call('SET', keys[6], resource .. ' ' .. text(wait_ms), 'PX', ask.memory_ms) end
  return {'full', ask.member, resource, text(wait_ms)}
end

-- What is held of all that this admission takes, by {tenant, adapter, window, reference, place}; and the fields of it.
local function counts_of(keys, ask, now)
  local fields = {fields_of(ask.tenant, ask.window, ask.digest)}
  local stored = redis.call('HMGET', keys[3], 'next_us', unpack(fields))
  if stored[1] and now >= tonumber(stored[1]) then
    sweep(keys, now, ask.sweep_max)
    stored = redis.call('HMGET', keys[3], 'next_us', unpack(fields))
  end
  return {next_us = tonumber(stored[1] or INTEGER_MAX), tenant = tonumber(stored[2] or 0),
    adapter = tonumber(stored[3] or 0), window = tonumber(stored[4] or 0), place = tonumber(stored[5] or 0),
    reference = tonumber(stored[6] or 0)}, fields
end

-- Take a lease as `take` does, with counts that were read.
local function lease(keys, ask, counts, fields, sums, lift, epoch, now)
  local cost, reserve, lease_us = lift + cost_of(ask.prompt, ask.output, 0, ask.weight), ask.reserve, ask.lease_us
  redis.call('HSET', keys[5], 'kind', 'admitted', 'body', ask.body, 'ingress', ask.ingress, 'decision', ask.decision,
    'digest', ask.digest, 'window', ask.window, 'expires_ms', ask.expires_ms, 'lease_us', lease_us, 'admitted_us', now,
    'epoch', epoch, 'held', '1', 'reserve', reserve, 'weight', ask.weight, 'tokens', reserve, 'cost', cost,
    'forget_ms', floor(now / 1000) + ask.memory_ms)
  if lift > 0 then redis.call('HSET', keys[5], 'lift', lift) end
  redis.call('ZADD', keys[2], lease_us, ask.member)
  redis.call('HSET', keys[3], fields[1], counts.tenant + 1, fields[2], counts.adapter + 1, fields[3], counts.window + 1,
    fields[4], counts.place + 1, fields[5], counts.reference + 1)
  if lease_us < counts.next_us then redis.call('HSET', keys[3], 'next_us', lease_us) end
  count(sums, now, reserve, cost, now)
  note_admitted(keys, ask.tenant, sums, now)
  write_sums(ask.tenant, sums)
  return {'leased', ask.member, text(now), text(lease_us), epoch, text(lift)}
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
  local refusal = ask.interactive and redis.call('GET', keys[6])
  if refusal then
    local resource, wait_ms = string.match(refusal, '^(%l+) (%d+)$')
    return {'full', ask.member, resource, wait_ms}
  end
  if now >= ask.expires_ms * 1000 then return {'expired', ask.member} end

  local counts, fields = counts_of(keys, ask, now)
  local sums = read_sums(ask.tenant, now)
  local limit, wait_ms = at_own_limit(ask, counts, sums, now)
  if limit then return refuse_for_now(keys, ask, limit, wait_ms) end
  if ask.window_max == 0 then return refuse_for_now(keys, ask, 'window', ask.retry_after_ms) end
  local own = counter_of(sums, now)
  local problem = ask_for_place(keys, ask, counts, own, now)
  if problem then return refuse_for_now(keys, ask, problem, ask.retry_after_ms) end
  return lease(keys, ask, counts, fields, sums, lift_of(keys, counts.tenant, sums, own, now), found.epoch, now)
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

