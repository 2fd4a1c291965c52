"""The statuses and codes by which S3, and the servers that speak as it does, say why a request failed: by what helps.

A code counts more than the status that comes with it, which differs among servers.
"""

# Another try: AWS' own clients make one (botocore/data/_retry.json for S3 and STS, botocore/retries/standard.py for what is
# throttled), or the data were changed or cut short on their way
# (https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html#ErrorCodeList).
PASSING = frozenset(
    {
        "BadDigest",
        "IDPCommunicationError",
        "IncompleteBody",
        "InternalError",
        "InternalFailure",
        "OperationAborted",
        "PriorRequestNotComplete",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "RequestTimeout",
        "RequestTimeoutException",
        "ServiceUnavailable",
        "SlowDown",
        "ThrottledException",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
        "XAmzContentSHA256Mismatch",
    }
)
PASSING_STATUSES = frozenset({408, 409, 425, 429})  # and those of the server's own errors, from 500 on
# Fresh credentials: S3's codes and STS's, of what was valid before; and of what is not known, as a key that was replaced, or
# at MinIO a token that has expired.
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
UNKNOWN = ("InvalidToken", "InvalidTokenId", "InvalidAccessKeyId")
# Space: a quota in Ceph (rgw_common.cc, with 403) and MinIO (cmd/api-errors.go, with 400), and full disks.
FULL = frozenset({"QuotaExceeded", "StorageFull", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull"})
FULL_STATUS = 507
# Another policy; also of one object of many.
REFUSED = frozenset({"AccessDenied"})
REFUSED_STATUSES = frozenset({401, 403})
# Another request, or another policy: a malformed one is what a server calls a request that it does not know.
REQUEST_REFUSED_STATUSES = REFUSED_STATUSES | {400, 405, 501}
# This machine's clock.
SKEWED = frozenset({"RequestTimeTooSkewed"})
