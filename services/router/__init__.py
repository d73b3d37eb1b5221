"""The router: where and when a job runs. Holds nothing that the bus does not tell it again within a second."""
