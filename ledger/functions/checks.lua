#!lua name=switchyard
-- The ledger's functions: each one changes all it names, or nothing. One library of several files, in the order of
-- ledger/functions/calls.py; this one holds what all others ask: arguments, time, and whether the gate is open.
--
-- KEYS, for every function: 1 gate, 2 leases, 3 counts, 4 recent, 5 the job's row (ledger/keys.py); what is named by
-- a tenant or a window is derived here, under the same hash tag.
-- ARGS[1] is always the job as `<tenant>/<job id>` ('' where no job is meant). Every answer begins {word, ARGS[1], ...},
-- so that the caller can tell an answer to another's question. Numbers are integers below 2^53; names end with their
-- unit; time is Redis' own. Arguments are checked before the first write, since a failing function is not rolled back.

local PREFIX = '{switchyard}:'
local ROW_PREFIX = PREFIX .. 'job:'
local SPENT = PREFIX .. 'spent'
local ASKED_PREFIX = PREFIX .. 'asked:'
local INTEGER_MAX = 9007199254740991
local PUT_MS_MIN = 3600000
local DECISION_BYTES_MAX = 65536
local TEXT_BYTES_MAX = 2048
-- What Lua can pass as single arguments has a bound.
local FIELDS_MAX = 1000

-- While a library is loaded there is no `math`; and this is cheaper.
local function floor(number)
  return number - number % 1
end

-- A number of an answer. Redis writes one of a command itself, an integer below 2^53 with all of its digits.
local function text(number)
  return string.format('%.0f', number)
end

local function refuse_unless(right, what)
  if not right then error({err = 'BADARG ' .. what}) end
end

local function integer(argument, what)
  local right = argument and string.match(argument, '^%d+$') and #argument <= 16
  refuse_unless(right and tonumber(argument) <= INTEGER_MAX, what)
  return tonumber(argument)
end

local function word(argument, what, bytes_max)
  refuse_unless(argument and #argument > 0 and #argument <= (bytes_max or TEXT_BYTES_MAX), what)
  return argument
end

local function member_of(argument)
  refuse_unless(argument and #argument <= 256 and string.match(argument, '^[a-z0-9-]+/.'), 'job')
  return argument
end

local function tenant_of(member)
  return string.match(member, '^[^/]+')
end

local function now_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- A server process has one run id and loads the library anew, so that it is asked once.
local known_run_id
local function run_id()
  known_run_id = known_run_id or string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  return known_run_id
end

-- {open, epoch} of this server's gate; nil for one that another server process left behind, or none.
local function gate(keys)
  local stored = redis.call('HMGET', keys[1], 'run_id', 'epoch', 'open')
  if not stored[2] or stored[1] ~= run_id() then return nil end
  return {open = stored[3] == '1', epoch = stored[2]}
end

local function open_gate(keys)
  local found = gate(keys)
  return found and found.open and found or nil
end

