"""The process that decides for a job. Only this package imports its modules.

A decision belongs to `machine` or to rekindle.recovery, and I/O to `process` and `http_api`. The
package may not import Prefect, kubernetes, boto3, engines, agent or training. Only `process` may
import the fault tables.
"""
