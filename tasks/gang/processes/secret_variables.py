"""The variables of the environment with which Prefect's API and server are reached, and which no rank needs."""

SECRETS_OF_PREFECT = frozenset(
    {
        "PREFECT_API_AUTH_STRING",
        "PREFECT_API_DATABASE_CONNECTION_URL",
        "PREFECT_API_DATABASE_PASSWORD",
        "PREFECT_API_KEY",
        "PREFECT_CLIENT_CUSTOM_HEADERS",  # such as {"Authorization": "Bearer ..."}, for a proxy before the API
        "PREFECT_SERVER_API_AUTH_STRING",
        "PREFECT_SERVER_DATABASE_CONNECTION_URL",
        "PREFECT_SERVER_DATABASE_PASSWORD",
        "PREFECT_SERVER_DOCKET_URL",  # of Redis, with its login
    }
)
