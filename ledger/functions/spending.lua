-- What tenants have used and reserved, and whose turn it is (ledger/tokens.py, ledger/fairness.py).

local BUCKET_US, BUCKETS, DAY_US = 5000000, 13, 86400000000
local PERIOD_US, PERIODS, ACTIVE_US = 60000000, 8, 60000000
local SEEN_US, WAITING_US, HEADROOM_PART = 30000000, 600000, 8
local OUTPUT_COST, LOAD_COST_PER_MS, WEIGHT_UNIT = 2, 1, 100
-- A tenant's sums outlive the day that they are for.
local SPENT_MS = 172800000

local function cost_of(prompt, output, load_ms, weight)
  return math.floor((prompt + OUTPUT_COST * output + LOAD_COST_PER_MS * load_ms) * WEIGHT_UNIT / weight)
end

-- A tenant's sums that still count, and the fields that do not: {buckets, minute, day, counter, old}.
local function spent_of(tenant, now)
  local flat = redis.call('HGETALL', SPENT_PREFIX .. tenant)
  local bucket_now, day_now = math.floor(now / BUCKET_US), math.floor(now / DAY_US)
  local period_now = math.floor(now / PERIOD_US)
  local found = {buckets = {}, minute = 0, day = 0, counter = 0, old = {}}
  for i = 1, #flat, 2 do
    local kind, unit, sum = string.sub(flat[i], 1, 1), tonumber(string.sub(flat[i], 2)), tonumber(flat[i + 1])
    if kind == 'm' and unit > bucket_now - BUCKETS and unit <= bucket_now then
      found.buckets[#found.buckets + 1] = {unit, sum}
      found.minute = found.minute + sum
    elseif kind == 'd' and unit == day_now then
      found.day = sum
    elseif kind == 'f' and unit > period_now - PERIODS and unit <= period_now then
      found.counter = found.counter + math.floor(sum / 2 ^ (period_now - unit))
    elseif kind ~= 'd' or unit < day_now then
      found.old[#found.old + 1] = flat[i]
    end
  end
  return found
end

-- Call `add(field, amount)` for every sum that a job counts for which was admitted then; what no longer counts is none.
local function each_sum(admitted, tokens, cost, now, add)
  if tokens ~= 0 then
    local bucket, day = math.floor(admitted / BUCKET_US), math.floor(admitted / DAY_US)
    if bucket > math.floor(now / BUCKET_US) - BUCKETS then add('m' .. text(bucket), tokens) end
    if day >= math.floor(now / DAY_US) then add('d' .. text(day), tokens) end
  end
  local period = math.floor(admitted / PERIOD_US)
  if cost ~= 0 and period > math.floor(now / PERIOD_US) - PERIODS then add('f' .. text(period), cost) end
end

local function spend(tenant, admitted, tokens, cost, now)
  each_sum(admitted, tokens, cost, now, function(field, amount)
    redis.call('HINCRBY', SPENT_PREFIX .. tenant, field, text(amount))
  end)
end

-- Until so many tokens have left the minute that the reserve fits.
local function minute_wait_us(spent, reserve, limit, now)
  local left, leaves = spent.minute, now
  table.sort(spent.buckets, function(one, other) return one[1] < other[1] end)
  for _, bucket in ipairs(spent.buckets) do
    left = left - bucket[2]
    leaves = (bucket[1] + BUCKETS) * BUCKET_US
    if left + reserve <= limit then break end
  end
  return leaves - now
end

-- The tenant's own limit that is reached, and what to wait for it; nil where it is within all of them.
local function at_own_limit(ask, counts, spent, now)
  if counts.tenant >= ask.concurrency_max then return 'tenant', ask.retry_after_ms end
  if counts.adapter >= ask.adapter_concurrency_max then return 'adapter', ask.retry_after_ms end
  local wait
  if spent.day + ask.reserve > ask.tokens_per_day then
    wait = (math.floor(now / DAY_US) + 1) * DAY_US - now
    return 'budget', math.max(1, math.ceil(wait / 1000))
  end
  if spent.minute + ask.reserve > ask.tokens_per_minute then
    wait = minute_wait_us(spent, ask.reserve, ask.tokens_per_minute, now)
    return 'rate', math.max(1, math.ceil(wait / 1000))
  end
  return nil
end

-- What a tenant that comes back is behind the lowest of the others: no credit is banked.
local function lift_of(keys, tenant, held, own, now)
  if held > 0 then return 0 end
  local last = redis.call('ZSCORE', keys[4], tenant)
  if last and tonumber(last) > now - ACTIVE_US then return 0 end
  local lowest
  for _, other in ipairs(redis.call('ZRANGE', keys[4], '(' .. text(now - ACTIVE_US), '+inf', 'BYSCORE')) do
    local counter = spent_of(other, now).counter
    if not lowest or counter < lowest then lowest = counter end
  end
  return math.max(0, (lowest or 0) - own)
end

-- Who has a part in a window: {tenant = {weight, held, reserved}} of those that asked lately, or have places reserved.
local function claims_of(keys, ask, now)
  local names, claims = {}, {}
  for _, tenant in ipairs(redis.call('ZRANGE', SEEN_PREFIX .. ask.window, '(' .. text(now - SEEN_US), '+inf', 'BYSCORE')) do
    names[#names + 1] = tenant
    claims[tenant] = {reserved = 0}
  end
  local weights = redis.call('HMGET', WEIGHTS, unpack(names))
  for i, tenant in ipairs(names) do claims[tenant].weight = tonumber(weights[i] or '0') end
  for tenant, places in pairs(ask.reserved) do
    if not claims[tenant] then
      names[#names + 1] = tenant
      claims[tenant] = {weight = 0}
    end
    claims[tenant].reserved = places
  end
  local fields = {}
  for i, tenant in ipairs(names) do fields[i] = 'p|' .. ask.window .. '|' .. tenant end
  local held = redis.call('HMGET', keys[3], unpack(fields))
  for i, tenant in ipairs(names) do claims[tenant].held = tonumber(held[i] or '0') end
  return claims
end

-- Places that are each tenant's own.
local function shares_of(window_max, claims)
  local left, weights, owed = window_max - math.floor(window_max / HEADROOM_PART), 0, {}
  for _, claim in pairs(claims) do
    left = left - claim.reserved
    weights = weights + claim.weight
  end
  left = math.max(0, left)
  for tenant, claim in pairs(claims) do
    local own = claim.weight > 0 and math.max(1, math.floor(left * claim.weight / weights)) or 0
    owed[tenant] = claim.reserved + own
  end
  return owed
end

-- How many that wait for the same kind of place have a lower counter.
local function before(ask, claims, owed, within, own, now)
  local count = 0
  local waiting = redis.call('ZRANGE', WAITING_PREFIX .. ask.window, '(' .. text(now), '+inf', 'BYSCORE')
  for _, other in ipairs(waiting) do
    local claim = claims[other]
    if other ~= ask.tenant and claim and (claim.held < owed[other]) == within and spent_of(other, now).counter < own then
      count = count + 1
    end
  end
  return count
end

-- nil where the tenant may take a place of the window, else why not.
local function no_place(keys, ask, counts, own, now)
  if counts.window >= ask.window_max then return 'window' end
  local claims, free = claims_of(keys, ask, now), ask.window_max - counts.window
  local owed = shares_of(ask.window_max, claims)
  local within = claims[ask.tenant].held < owed[ask.tenant]
  if not within then
    free = free - math.floor(ask.window_max / HEADROOM_PART)
    for tenant, claim in pairs(claims) do
      if tenant ~= ask.tenant then free = free - math.max(0, owed[tenant] - claim.held) end
    end
  end
  if free > before(ask, claims, owed, within, own, now) then return nil end
  return within and 'window' or 'share'
end

local function ask_for_place(ask, now)
  redis.call('ZADD', SEEN_PREFIX .. ask.window, text(now), ask.tenant)
  redis.call('PEXPIRE', SEEN_PREFIX .. ask.window, text(SEEN_US / 1000))
  redis.call('HSET', WEIGHTS, ask.tenant, text(ask.weight))
end

local function wait_for_place(ask, now)
  redis.call('ZADD', WAITING_PREFIX .. ask.window, text(now + WAITING_US), ask.tenant)
  redis.call('PEXPIRE', WAITING_PREFIX .. ask.window, text(WAITING_US / 1000))
end
