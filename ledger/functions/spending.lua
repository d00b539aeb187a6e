-- What tenants have used and reserved (ledger/tokens.py, ledger/fairness.py).
--
-- A tenant's sums are one text of numbers, because every admission reads all of them: its last admission, the newest
-- bucket, then sums of buckets, of fairness periods and of days, newest first. A little more is kept than counts: what
-- a server was ahead of its successor, when it admitted, is not lost.

local BUCKET_US, BUCKETS, DAY_US = 5000000, 13, 86400000000
local PERIOD_US, PERIODS, ACTIVE_US = 60000000, 8, 60000000
local OUTPUT_COST, LOAD_COST_PER_MS, WEIGHT_UNIT = 2, 1, 100

local LAST, NEWEST = 1, 2
local AHEAD = 3
-- Where sums of a kind begin, how many there are, and how many buckets each lasts.
local MINUTE = {first = 3, kept = BUCKETS + AHEAD, buckets = 1}
local COUNTER = {first = 3 + MINUTE.kept, kept = PERIODS + 1, buckets = PERIOD_US / BUCKET_US}
local DAY = {first = 3 + MINUTE.kept + COUNTER.kept, kept = 2, buckets = DAY_US / BUCKET_US}
local KINDS = {MINUTE, COUNTER, DAY}
local NUMBERS_KEPT = DAY.first + DAY.kept - 1
local FORMAT = '<ddddddddddddddddddddddddddddd'

local function cost_of(prompt, output, load_ms, weight)
  return floor((prompt + OUTPUT_COST * output + LOAD_COST_PER_MS * load_ms) * WEIGHT_UNIT / weight)
end

-- Make another bucket the newest: what becomes too old, or lies after it, is forgotten.
local function shift(sums, newest)
  for _, kind in ipairs(KINDS) do
    local steps = floor(newest / kind.buckets) - floor(sums[NEWEST] / kind.buckets)
    local from, to, step = kind.first + kind.kept - 1, kind.first, -1
    if steps < 0 then from, to, step = to, from, 1 end
    if steps ~= 0 then
      for i = from, to, step do
        local source = i - steps
        sums[i] = source >= kind.first and source < kind.first + kind.kept and sums[source] or 0
      end
    end
  end
  sums[NEWEST] = newest
end

-- A tenant's sums from what is stored, moved to this time.
local function sums_of(stored, now)
  local bucket, sums = floor(now / BUCKET_US), nil
  if stored then
    sums = {struct.unpack(FORMAT, stored)}
  else
    sums = {0, bucket}
    for i = NEWEST + 1, NUMBERS_KEPT do sums[i] = 0 end
  end
  if sums[NEWEST] < bucket then
    shift(sums, bucket)
  elseif sums[NEWEST] > bucket + AHEAD then
    shift(sums, bucket + AHEAD)
  end
  return sums
end

local function read_sums(tenant, now)
  return sums_of(redis.call('HGET', SPENT, tenant), now)
end

local function write_sums(tenant, sums)
  redis.call('HSET', SPENT, tenant, struct.pack(FORMAT, unpack(sums, 1, NUMBERS_KEPT)))
end

-- Where the sum of a kind that runs now is: those behind it are older.
local function current(sums, kind, now)
  return kind.first + floor(sums[NEWEST] / kind.buckets) - floor(floor(now / BUCKET_US) / kind.buckets)
end

local function minute_of(sums, now)
  local first, minute = current(sums, MINUTE, now), 0
  for i = first, first + BUCKETS - 1 do minute = minute + sums[i] end
  return minute
end

local function day_of(sums, now)
  return sums[current(sums, DAY, now)]
end

local function counter_of(sums, now)
  local first, counter = current(sums, COUNTER, now), 0
  for age = 0, PERIODS - 1 do
    local sum = sums[first + age]
    if sum ~= 0 then counter = counter + floor(sum / 2 ^ age) end
  end
  return counter
end

-- Count for a job that was admitted then; what no longer counts is nowhere.
local function count(sums, admitted, tokens, cost, now)
  local bucket = floor(admitted / BUCKET_US)
  if bucket > sums[NEWEST] and bucket <= floor(now / BUCKET_US) + AHEAD then shift(sums, bucket) end
  for _, kind in ipairs(KINDS) do
    local age = floor(sums[NEWEST] / kind.buckets) - floor(bucket / kind.buckets)
    local i = kind.first + age
    if age >= 0 and age < kind.kept then sums[i] = sums[i] + (kind == COUNTER and cost or tokens) end
  end
end

-- Note a tenant's admission. The time in `recent` is exact to a bucket: the tenant's own is with its sums.
local function note_admitted(keys, tenant, sums, admitted)
  if floor(admitted / BUCKET_US) > floor(sums[LAST] / BUCKET_US) then redis.call('ZADD', keys[4], 'GT', admitted, tenant) end
  sums[LAST] = math.max(sums[LAST], admitted)
end

-- Call `see(tenant, sums)` for the tenants whose last admission is after that.
local function each_recent(keys, since, now, see)
  local names = redis.call('ZRANGE', keys[4], '(' .. text(since - BUCKET_US), '+inf', 'BYSCORE')
  for first = 1, #names, FIELDS_MAX do
    local last = math.min(first + FIELDS_MAX - 1, #names)
    for i, stored in ipairs(redis.call('HMGET', SPENT, unpack(names, first, last))) do
      local sums = sums_of(stored, now)
      if sums[LAST] > since then see(names[first + i - 1], sums) end
    end
  end
end

-- Until so many tokens have left the minute that the reserve fits.
local function minute_wait_us(sums, left, reserve, limit, now)
  local first, newest, leaves = current(sums, MINUTE, now), floor(now / BUCKET_US), now
  for age = BUCKETS - 1, 0, -1 do
    if sums[first + age] ~= 0 then
      left = left - sums[first + age]
      leaves = (newest - age + BUCKETS) * BUCKET_US
      if left + reserve <= limit then break end
    end
  end
  return leaves - now
end

-- The tenant's own limit that is reached, and what to wait for it; nil where it is within all of them.
local function at_own_limit(ask, counts, sums, now)
  if counts.tenant >= ask.concurrency_max then return 'tenant', ask.retry_after_ms end
  if counts.adapter >= ask.adapter_concurrency_max then return 'adapter', ask.retry_after_ms end
  local wait
  if day_of(sums, now) + ask.reserve > ask.tokens_per_day then
    wait = (floor(now / DAY_US) + 1) * DAY_US - now
    return 'budget', math.max(1, math.ceil(wait / 1000))
  end
  local minute = minute_of(sums, now)
  if minute + ask.reserve > ask.tokens_per_minute then
    wait = minute_wait_us(sums, minute, ask.reserve, ask.tokens_per_minute, now)
    return 'rate', math.max(1, math.ceil(wait / 1000))
  end
  return nil
end

-- What a tenant that comes back is behind the lowest of the others: no credit is banked.
local function lift_of(keys, held, sums, own, now)
  if held > 0 or sums[LAST] > now - ACTIVE_US then return 0 end
  local lowest
  each_recent(keys, now - ACTIVE_US, now, function(_, others)
    local counter = counter_of(others, now)
    if not lowest or counter < lowest then lowest = counter end
  end)
  return math.max(0, (lowest or 0) - own)
end
