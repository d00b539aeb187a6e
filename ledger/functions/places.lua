-- Whose turn it is in a window (ledger/fairness.py).
--
-- By window: who asked for a place lately, each as {when, weight, until when it is waited for}, and a sum of all. Where
-- the sum shows that the tenant is within its share whoever else is active, and that nobody waits, nobody is looked at.

local SEEN_US, WAITING_US, HEADROOM_PART = 30000000, 600000, 8
-- Looked at again when a window was not asked for so long; by then it holds nothing that counts.
local KEPT_US = 300000000
local ENTRY = '<ddd'
-- The field of the sum {weights, the last wait, how long the key is kept}: no tenant has this name.
local ALL = ''

local function headroom(window_max)
  return floor(window_max / HEADROOM_PART)
end

local function own_places(ask, reserved, weights)
  local left = math.max(0, ask.window_max - headroom(ask.window_max) - reserved)
  return math.max(1, floor(left * ask.weight / weights))
end

-- Who has a part in a window: {tenant = {weight, waits, held, reserved}} of those that asked lately, the tenant itself
-- among them, or have places reserved; and the weights of all. Whoever asked too long ago is forgotten.
local function claims_of(keys, key, ask, now)
  local names, old, weights = {ask.tenant}, {}, ask.weight
  local claims = {[ask.tenant] = {weight = ask.weight, waits = 0, reserved = 0}}
  local flat = redis.call('HGETALL', key)
  for i = 1, #flat, 2 do
    local tenant = flat[i]
    if tenant ~= ALL and tenant ~= ask.tenant then
      local seen, weight, waits = struct.unpack(ENTRY, flat[i + 1])
      if seen > now - SEEN_US then
        names[#names + 1] = tenant
        claims[tenant] = {weight = weight, waits = waits, reserved = 0}
        weights = weights + weight
      else
        old[#old + 1] = tenant
      end
    end
  end
  for first = 1, #old, FIELDS_MAX do
    redis.call('HDEL', key, unpack(old, first, math.min(first + FIELDS_MAX - 1, #old)))
  end
  for tenant, places in pairs(ask.reserved) do
    if not claims[tenant] then
      names[#names + 1] = tenant
      claims[tenant] = {weight = 0, waits = 0}
    end
    claims[tenant].reserved = places
  end
  for first = 1, #names, FIELDS_MAX do
    local fields = {}
    for i = first, math.min(first + FIELDS_MAX - 1, #names) do fields[#fields + 1] = 'p|' .. ask.window .. '|' .. names[i] end
    for i, held in ipairs(redis.call('HMGET', keys[3], unpack(fields))) do
      claims[names[first + i - 1]].held = tonumber(held or '0')
    end
  end
  return claims, weights
end

-- Places that are each tenant's own.
local function shares_of(ask, claims, weights)
  local left, owed = math.max(0, ask.window_max - headroom(ask.window_max) - ask.reserved_sum), {}
  for tenant, claim in pairs(claims) do
    local own = claim.weight > 0 and math.max(1, floor(left * claim.weight / weights)) or 0
    owed[tenant] = claim.reserved + own
  end
  return owed
end

-- How many that wait for the same kind of place have a lower counter.
local function before(ask, claims, owed, within, own, now)
  local found = 0
  for other, claim in pairs(claims) do
    if other ~= ask.tenant and claim.waits > now and (claim.held < owed[other]) == within
      and counter_of(read_sums(other, now), now) < own then
      found = found + 1
    end
  end
  return found
end

-- nil where the tenant may take one of the free places, else why not.
local function contested(ask, claims, weights, free, own, now)
  local owed = shares_of(ask, claims, weights)
  local within = claims[ask.tenant].held < owed[ask.tenant]
  if not within then
    free = free - headroom(ask.window_max)
    for tenant, claim in pairs(claims) do
      if tenant ~= ask.tenant then free = free - math.max(0, owed[tenant] - claim.held) end
    end
  end
  if free > before(ask, claims, owed, within, own, now) then return nil end
  return within and 'window' or 'share'
end

-- Note that the tenant asks for a place. nil where it may take one; else why not, and it is waited for.
local function ask_for_place(keys, ask, counts, own, now)
  local key = ASKED_PREFIX .. ask.window
  local stored = redis.call('HMGET', key, ask.tenant, ALL)
  local known, waited, kept = 0, 0, 0
  if stored[2] then known, waited, kept = struct.unpack(ENTRY, stored[2]) end
  local weights = known + ask.weight
  if stored[1] then
    local _, weight = struct.unpack(ENTRY, stored[1])
    weights = weights - weight
  end
  local problem, free = nil, ask.window_max - counts.window
  if free <= 0 then
    problem = 'window'
  elseif waited > now or counts.place >= (ask.reserved[ask.tenant] or 0) + own_places(ask, ask.reserved_sum, weights) then
    local claims
    claims, weights = claims_of(keys, key, ask, now)
    problem = contested(ask, claims, weights, free, own, now)
  end
  local waits, keeps = problem and now + WAITING_US or 0, kept
  if kept < now + SEEN_US then keeps = now + KEPT_US end
  redis.call('HSET', key, ask.tenant, struct.pack(ENTRY, now, ask.weight, waits))
  if weights ~= known or waits > waited or keeps ~= kept then
    redis.call('HSET', key, ALL, struct.pack(ENTRY, weights, math.max(waits, waited), keeps))
  end
  if keeps ~= kept then redis.call('PEXPIRE', key, KEPT_US / 1000) end
  return problem
end
