"""The HTTP statuses and error codes of S3 and compatible servers, Google and Azure, grouped by the remedy.

A code takes precedence over the status that comes with it, which differs among servers.
"""

# Remedy: another try. AWS' own clients retry (botocore/data/_retry.json for S3 and STS, botocore/retries/standard.py for
# throttling), or the data were changed or cut short in transit
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
PASSING_STATUSES = frozenset({408, 409, 425, 429})  # and all from 500 on, the server's own errors
# Remedy: an online tier, to which Azure's blob is rehydrated in hours. They come with 409.
ARCHIVED = frozenset({"BlobArchived", "BlobBeingRehydrated"})
# Remedy: fresh credentials. EXPIRED are the codes of S3 and STS for credentials that were valid before; UNKNOWN those for
# unknown credentials, such as a replaced key, or at MinIO an expired token; InvalidClientTokenId is that of STS. The last four
# are Azure's, Google's, and those of Google's and Microsoft's services for tokens; Azure's is for expired ones, too, and the
# text after it tells them apart.
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
UNKNOWN = (
    "InvalidToken",
    "InvalidTokenId",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "AuthenticationFailed",
    "AuthenticationRequired",
    "invalid_grant",
    "invalid_client",
)
# Remedy: free space. A quota in Ceph (rgw_common.cc, with 403) and MinIO (cmd/api-errors.go, with 400), and full disks.
FULL = frozenset({"QuotaExceeded", "StorageFull", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull"})
FULL_STATUS = 507
# Remedy: another policy, or a login. The code may also be that of one object of many; the second is Azure's, with 409.
REFUSED = frozenset({"AccessDenied", "PublicAccessNotPermitted"})
REFUSED_STATUSES = frozenset({401, 403})
# Remedy: another request, or another policy. Some servers call a request that they do not support malformed.
REQUEST_REFUSED_STATUSES = REFUSED_STATUSES | {400, 405, 501}
# Remedy: set this machine's clock.
SKEWED = frozenset({"RequestTimeTooSkewed"})
