"""The registry's way in: adapters and bases are scanned, validated, digested, stored, approved and revoked."""
