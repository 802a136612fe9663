"""Runs a coroutine on a loop of its own, and fails on whatever the loop had to complain about."""

import asyncio
import gc


def run(main):
    """The coroutine's result. Fails on unretrieved task exceptions, pending tasks and unclosed generators."""
    complaints = []

    async def supervised():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        try:
            return await main
        finally:
            await asyncio.sleep(0)
            gc.collect()
            await asyncio.sleep(0)
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            complaints.extend({"pending": repr(task)} for task in left)

    gc.freeze()  # What was there before is not of interest, and collecting it takes most of a test's time.
    try:
        return asyncio.run(supervised())
    finally:
        gc.collect()
        gc.unfreeze()
        assert complaints == []
