"""Places of the code that hold a promise of docs/reliability.md or docs/security.md, how each would
be broken, and the test that is to see it (benchmarks/broken.py)."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """`sound` stands once in `file`, and `broken` in its stead breaks the promise. `is_slow`: the
    test starts ranks, or takes long."""

    item: str
    name: str
    file: str
    sound: str
    broken: str
    test: str
    is_slow: bool = False


_FAULTS = "tests/mpi/test_faults.py::test_"
_CHANGED = "tests/xgpt/app/resuming/test_changed_since.py::test_"
_BROKEN_MODELS = "tests/xrunner/checkpoint/test_broken_models.py::test_"

PLACES = (
    # what commands say of a run, of copies, of a refusal; the package
    Place("9 stops", "a run that is stopped as it starts is told as killed",
          "xgpt/run_folder/files.py",
          'write_progress(output / "progress.json", replace(now, state="stopped"))', "pass",
          "tests/xgpt/app/test_status.py::"
          "test_a_run_that_is_stopped_as_it_starts_was_stopped"),
    Place("9 stops", "a rank that was not heard was heard in 1970", "xgpt/run_folder/state.py",
          "    return None if state.at_s is None else max(", "    return max(",
          "tests/xgpt/app/test_status.py::"
          "test_ranks_that_tell_nothing_any_more_were_not_heard_in_1970"),
    Place("9 stops", "a run that starts is not found once its requests are gone",
          "xgpt/run_folder/files.py", "return own if is_there else None", "return None",
          "tests/xgpt/app/test_status.py::"
          "test_a_run_that_starts_needs_its_requests_no_more"),
    Place("figures", "a head that is not there is asked for", "xsimulator/layer_times.py",
          "if not self.has_head:", "if self.has_head is None:",
          "tests/xsimulator/test_stage_times.py::test_a_model_without_a_head_needs_no_head_times"),
    Place("figures", "of unlike copies one kind is replayed", "xsimulator/replay/replicas.py",
          "    if not estimate.others:\n        alone", "    if estimate:\n        alone",
          "tests/xgpt/app/test_unlike_copies_followed.py::"
          "test_all_copies_are_replayed_and_each_is_compared_with_its_own_formula"),
    Place("figures", "a refusal for too few queries speaks of memory",
          "xscheduler/refusals.py", "    if least.memory_bytes > room:", "    if least.is_timed:",
          "tests/xgpt/cli/test_profile_files.py::test_what_forbids_a_division_is_named"),
    Place("package", "its version is not the library's", "setup.cfg",
          "version = attr: xgpt.__version__", "version = 0.0.9",
          "tests/xrunner/ops/test_wheel.py::test_a_source_distribution_holds_csrc"),
    # answers that are wrong without a word
    Place("1 stored with fewer bits", "a method nobody knows is read as plain weights",
          "xgpt/core/hf/quantised.py",
          'for key in ("quantization_config", "compression_config"):', "for key in ():",
          "tests/xgpt/core/test_model_spec.py::"
          "test_a_wrong_config_is_refused_by_its_keys"),
    Place("1 stored with fewer bits", "scales beside weights that no config speaks of",
          "xrunner/checkpoint/tensors.py",
          "        mistakes = list(_misfits(directory, spec, tensors, places, spare))",
          "        mistakes = []",
          f"{_BROKEN_MODELS}weights_of_fewer_bits_and_their_scales_are_refused"),
    Place("1 another model than config.json says", "keys that others read are ignored",
          "xgpt/core/hf/config.py", "        config.only(key, only)\n", "        pass\n",
          "tests/xrunner/checkpoint/test_every_key.py"),
    Place("1 another model than config.json says", "windows of a family without them are ignored",
          "xgpt/core/hf/config.py", "if window is not None and (most is None or window < most):",
          "if False:", "tests/xrunner/checkpoint/test_every_key.py::"
          "test_windows_are_refused_by_their_key_where_the_family_has_none"),
    Place("1 another model than config.json says", "a head that is gone is the embedding",
          "xrunner/checkpoint/layout.py", 'name == HEAD and spec.family == "t5"', "name == HEAD",
          "tests/xrunner/checkpoint/test_every_tensor.py::"
          "test_a_tensor_of_any_kind_that_is_gone_is_refused_by_its_name"),
    Place("1 another model than config.json says", "tied tables that differ are not compared",
          "xrunner/checkpoint/tensors.py", "if not _are_same(tensors, places, first, other):",
          "if False:", "tests/xrunner/checkpoint/test_every_tensor.py::"
          "test_tied_tables_are_read_by_whichever_name_the_file_has"),
    Place("2 another model", "files that changed are not looked for",
          "xrunner/checkpoint/identity.py",
          "return sorted(name for name in before.keys() | now.keys() if before.get(name)",
          "return sorted(name for name in () if before.get(name)",
          f"{_CHANGED}a_stopped_run_is_not_gone_on_with_by_another_model"),
    Place("2 another model", "its path is part of what a run is known by", "xrunner/plan.py",
          "key in _DECISIVE}", 'key in (*_DECISIVE, "model_dir")}',
          f"{_CHANGED}a_folder_that_was_moved_goes_on"),
    Place("2 another model", "weights are known by their headers alone",
          "xrunner/checkpoint/identity.py", "for block in range(1, _BLOCKS + 1):",
          "for block in ():", "tests/xrunner/checkpoint/test_checkpoint.py::"
          "test_other_weights_of_the_same_size_and_shape_are_another_model"),
    Place("2 another model", "run.verify reads no more than the samples", "xrunner/plan.py",
          "name for name in common if self.weights_whole[name] != weights_whole[name])})",
          "name for name in common if not name)})",
          f"{_CHANGED}a_byte_between_the_samples_is_seen_by_who_reads_them_all"),
    Place("2 another model", "its chat template is no part of what it is known by",
          "xrunner/checkpoint/identity.py", '".model", ".jinja")', '".model")',
          "tests/xrunner/checkpoint/test_checkpoint.py::"
          "test_each_file_that_decides_answers_is_looked_at"),
    Place("3 not finite", "weights are not looked at", "xrunner/checkpoint/reader.py",
          "if taken.numel() and not all(", "if not taken.numel() and not all(",
          "tests/xrunner/checkpoint/test_checkpoint.py::"
          "test_weights_that_are_not_finite_are_named"),
    Place("3 not finite", "hidden states are not looked at", "xrunner/ops/sampling.py",
          "return tokens.masked_fill(is_none.to(tokens.device), NOT_FINITE)", "return tokens",
          "tests/xrunner/ops/test_sampling.py::test_a_row_that_is_not_finite_gives_no_token_whatever_its_logits"),
    Place("3 not finite", "a token that is none is taken for one",
          "xrunner/engine/pool_requests.py",
          "        if token == NOT_FINITE:\n", "        if False:\n",
          "tests/xrunner/engine/test_stopping.py::"
          "test_one_query_fails_and_the_others_keep_their_tokens"),
    Place("3 not finite", "a run without any answer is a success", "xgpt/app/running/finished.py",
          "    if count:\n", "    if count < 0:\n", "tests/xgpt/app/test_private_runs.py", True),
    Place("3 not finite", "tensors may have any shape and type", "xrunner/checkpoint/tensors.py",
          "        mistakes = list(_misfits(directory, spec, tensors, places, spare))",
          "        mistakes = []",
          f"{_BROKEN_MODELS}tensors_that_are_missing_or_of_other_shapes_are_told_at_once"),
    Place("4 OpenAI's keys", "what is not honoured is ignored", "xgpt/requests/keys.py",
          "            missing.append(key)", "            pass",
          "tests/xgpt/core/test_request_keys.py"),
    Place("4 OpenAI's keys", "in our own lines sampling keys are columns like any other",
          "xgpt/requests/keys.py", "(row.is_column and place not in _OPENAI)",
          "(OWN not in row.given and place not in _OPENAI)",
          "tests/xgpt/core/test_request_keys.py"),
    Place("4 OpenAI's keys", "of a list of prompts the first is answered",
          "xgpt/requests/reader.py", "yield from taken.others", "pass",
          "tests/xrunner/io/test_lists_of_inputs.py"),
    Place("4 OpenAI's keys", "completions get the chat template",
          "xrunner/files/spooled_requests.py",
          "not (is_chat and not request.is_openai)", "not is_chat",
          "tests/xrunner/io/test_spooled_requests.py::"
          "test_a_prompt_of_openais_completions_never_gets_the_chat_template"),
    Place("5 ranges", "values of a schedule are not checked", "xgpt/core/units.py",
          "Positive = Annotated[int, Field(strict=True, ge=1, le=MAX_COUNT)]",
          "Positive = Annotated[int, Field(le=MAX_COUNT)]",
          "tests/xgpt/core/test_whole_file.py::"
          "test_a_value_that_cannot_be_is_named_with_what_is_allowed"),
    Place("5 ranges", "a profile may say that nothing takes no time", "xprofiler/profile_file.py",
          '"seconds above 0: nothing takes no time"))', '"seconds above 0")) if False else None',
          "tests/xprofiler/test_profile_file.py"),
    Place("5 ranges", "whole numbers of a job have no most", "xgpt/job/typed.py",
          'return Number("", ge=least, le=most)', 'return Number("", ge=least)',
          "tests/xgpt/core/test_wrong_jobs.py"),
    Place("5 ranges", "whole numbers of a schedule have no most", "xgpt/core/units.py",
          "MAX_COUNT = 2**53 ", "MAX_COUNT = 10**40 ", "tests/xgpt/core/test_whole_file.py::"
          "test_a_value_that_cannot_be_is_named_with_what_is_allowed"),
    Place("5 ranges", "an operator may take longer than a day", "xprofiler/profile_file.py",
          "_MOST_S = 86_400.0", "_MOST_S = 1e300",
          "tests/xprofiler/test_profile_file.py::test_a_row_that_is_no_point_is_refused"),
    Place("5 ranges", "a job file may be of any size", "xgpt/job/yaml_tree.py",
          "        if path.stat().st_size <= MAX_FILE_BYTES:", "        if path.exists():",
          "tests/xgpt/core/test_whole_file.py::test_a_file_that_is_no_job_file_is_refused"),
    Place("5 ranges", "YAML may be nested without end", "xgpt/job/yaml_tree.py",
          "    except RecursionError:", "    except ZeroDivisionError:",
          "tests/xgpt/core/test_whole_file.py::test_what_is_no_yaml_is_refused_with_its_line"),
    Place("5 ranges", "JSON files may be of any size", "xgpt/core/system/whole_file.py",
          "    if len(raw) > MOST_BYTES:", "    if len(raw) < 0:",
          "tests/xgpt/core/test_whole_file.py::test_what_is_larger_than_such_a_file_is_refused"),
    Place("5 ranges", "JSON may be nested without end", "xgpt/requests/file_rows.py",
          '    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:',
          "    if False:", "tests/xgpt/core/test_workload.py::"
          "test_what_is_nested_too_deeply_is_an_error_record"),
    Place("6 the same answers", "products depend on the batch", "xrunner/ops/invariant.py",
          "    outs = []\n    for first in range(0, len(x), tile):\n",
          "    return product(x)\n    for first in range(0, len(x), tile):\n",
          "tests/xrunner/engine/test_deterministic.py::"
          "test_a_row_of_a_product_is_the_same_bits_wherever_it_is"),
    # faults
    Place("hangs", "who is silent is not looked for", "xgpt/app/running/follow.py",
          "silent = [one for one in seen if now - one.changed_s > limit_s]", "silent = []",
          "tests/xgpt/app/test_live.py::"
          "test_who_holds_up_a_run_is_named_and_no_sooner"),
    Place("hangs", "who waits for a silent rank is told a time left", "xgpt/run_folder/state.py",
          "    return (oldest_s(states) or 0.0) > SILENT_S", "    return False",
          "tests/xgpt/app/test_live.py::test_who_waits_for_a_silent_rank_has_no_time_left"),
    Place("deaths", "ranks do not end with their launcher", "xgpt/core/system/lifeline.py",
          "    end_with_launcher()\n    sys.excepthook", "    sys.excepthook",
          "tests/xrunner/test_rank.py::test_a_rank_ends_with_the_pipe_of_its_launcher"),
    Place("deaths", "mpiexec outlives its command", "xgpt/launch/isolated.py",
          "prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)", "prctl(_PR_SET_PDEATHSIG, 0)",
          "tests/xgpt/launch/test_process.py::"
          "test_the_launcher_of_ranks_ends_with_who_started_it"),
    Place("deaths", "SIGUSR1 is not heard", "xgpt/launch/stop_signals.py", "signal.SIGUSR1, ", "",
          f"{_FAULTS}ranks_end_with_their_launcher[SIGUSR1]", True),
    Place("deaths", "a signal before the ranks start just ends it", "xgpt/launch/stop_signals.py",
          "        signal.signal(number, _stop)\n",
          "        signal.signal(number, signal.SIG_DFL)\n",
          f"{_FAULTS}a_signal_before_the_ranks_start_says_so[15]", True),
    Place("deaths", "a second signal is heard", "xgpt/launch/stop_signals.py",
          "        signal.signal(other, lambda *_: None)\n", "        pass\n",
          "tests/xgpt/cli/test_json_errors.py::test_signals_after_the_first_change_nothing"),
    Place("deaths", "ranks are not started again", "xgpt/app/running/deaths.py",
          "(not leg.is_trial and restarts == 0)", "not leg.is_trial",
          f"{_FAULTS}ranks_that_die_are_started_again_and_nothing_is_lost[kill a rank]", True),
    Place("deaths", "no query is suspected", "xrunner/files/deaths.py", "SUSPECT = 2 ",
          "SUSPECT = 10**9 ", f"{_FAULTS}a_query_that_kills_its_rank_is_isolated", True),
    Place("deaths", "a stop between a death and the next start is not heard",
          "xgpt/app/running/deaths.py",
          "            if StopRequest(plan.output).is_made:\n                raise",
          "            if leg.alone == -1:\n                raise",
          "tests/mpi/test_shortages.py::"
          "test_a_stop_between_a_death_and_the_next_start_ends_the_run", True),
    Place("one query's trouble", "a tokenizer's exception ends the run",
          "xrunner/engine/pool_requests.py",
          "        except Exception as cause:  # by a tokenizer: other requests must not suffer",
          "        except ZeroDivisionError as cause:",
          "tests/xrunner/engine/test_stopping.py::"
          "test_an_exception_of_the_tokenizer_is_the_end_of_its_query_alone"),
    Place("one query's trouble", "a text without a tokenizer ends the job",
          "xrunner/files/spooled_requests.py", "            if not self.tokenizer.is_there:",
          "            if False:",
          "tests/xrunner/io/test_spooled_requests.py::"
          "test_without_a_tokenizer_a_text_is_an_error_record_and_tokens_run"),
    Place("durable", "files get their names before they are on the disk",
          "xgpt/core/system/whole_file.py",
          "                file.flush()\n                os.fsync(file.fileno())\n",
          "                pass\n",
          "tests/xrunner/io/test_results.py::test_a_file_is_on_the_disk_before_its_name_is"),
    Place("durable", "names are not put on the disk", "xgpt/core/system/whole_file.py",
          "    if is_durable:\n        sync_folder(target.parent)\n", "",
          "tests/xrunner/io/test_results.py::test_a_file_is_on_the_disk_before_its_name_is"),
    Place("durable", "results are not put on the disk", "xrunner/files/results.py",
          "                os.fsync(copy)", "                pass",
          "tests/mpi/test_power_cut.py::"
          "test_what_was_written_is_on_the_disk_while_the_run_goes_on", True),
    Place("done is done", "results without an account are run again", "xgpt/app/running/resume.py",
          "    return count_results(results) == total\n", "    return False\n",
          f"{_FAULTS}a_job_whose_command_dies_before_its_account_is_done_whatever_is_planned_now",
          True),
    Place("one run at a time", "another host's run is not seen", "xrunner/files/lock.py",
          "if owner is not None and not _is_gone(output, owner):", "if owner is None:",
          "tests/xrunner/io/test_lock.py::"
          "test_another_hosts_run_is_seen_by_its_file_until_it_is_silent"),
    Place("one run at a time", "who died on this host keeps the folder", "xrunner/files/lock.py",
          'return _started(owner.get("pid")) != owner.get("started")', "return False",
          "tests/xrunner/io/test_lock.py::"
          "test_what_a_dead_process_of_this_host_left_is_taken_over_at_once"),
    Place("surroundings", "ranks get what other launchers left", "xgpt/launch/process.py",
          "environment_of_ranks() if is_managed else", "environment_of_ranks() if True else",
          "tests/mpi/test_other_launchers.py::"
          "test_ranks_here_meet_and_know_of_no_other_launcher"),
    Place("surroundings", "who waits to measure says nothing", "xgpt/app/profile.py",
          "- told_s >= _TELL_S:", "- told_s < 0:",
          "tests/xgpt/app/test_measuring_alone.py::"
          "test_the_wait_is_told_each_minute_with_who_holds_the_lock"),
    Place("surroundings", "a line of the batch script fails unseen", "xgpt/launch/slurm_jobs.py",
          'trap failed ERR"""', '"""', "tests/xgpt/launch/test_batch_script.py::"
          "test_a_line_that_fails_ends_the_job_by_its_name"),
    Place("surroundings", "idle allocations are requeued", "xgpt/launch/slurm_jobs.py",
          "idle=$((idle + 1)); else", "idle=0; else", "tests/xgpt/launch/test_batch_script.py::"
          "test_two_allocations_without_an_answer_end_the_job"),
    Place("surroundings", "a home is taken for granted", "xgpt/cli/main.py",
          "    has_home = os.path.isabs(home)", "    return None",
          "tests/xgpt/cli/test_json_errors.py::"
          "test_a_user_without_a_home_has_a_folder_that_is_nobody_elses"),
    Place("the folder fails", "results that are removed are not missed", "xrunner/files/results.py",
          "    return (own.st_dev, own.st_ino) == (named.st_dev, named.st_ino)", "    return True",
          "tests/xrunner/io/test_results.py::test_a_file_that_was_replaced_is_not_written_over"),
    Place("done is done", "a lost schedule.json decides", "xgpt/app/running/resume.py",
          "schedule.json\")\n    except (InputError, OSError):\n",
          "schedule.json\")\n    except ZeroDivisionError:\n",
          "tests/xgpt/app/resuming/test_resuming.py::"
          "test_other_files_than_the_results_do_not_decide_whether_a_job_is_done"),
    Place("done is done", "results are counted, not checked", "xrunner/files/result_line.py",
          "line is not None and line.query == count:", "line is not None:",
          "tests/xrunner/io/test_results.py::test_what_was_changed_is_told_and_put_right"),
    Place("done is done", "a job of which nothing can run is done", "xgpt/app/opened_job.py",
          "    if files is not None and not len(queries):", "    if False:",
          "tests/xgpt/app/resuming/test_resuming.py::"
          "test_requests_of_which_none_can_run_are_refused_before_anything_is_measured"),
    Place("done is done", "NaN in a table of JSON lines", "xgpt/core/system/whole_file.py",
          "parse_constant=lambda _: None)", "parse_constant=float)",
          "tests/xgpt/report/test_results_file.py::test_what_is_no_number_is_null_in_json"),
    Place("texts shown", "formulas are not quoted", "xgpt/report/results_file.py",
          "_unformulated if quote_formulas else _cell", "_cell",
          "tests/xgpt/report/test_results_file.py::"
          "test_texts_that_a_spreadsheet_would_compute_can_be_quoted"),
    Place("the folder fails", "what mpiexec wrote in /tmp stays", "xgpt/launch/leftovers.py",
          "\"hydra_hwloc_xmlfile_*\", 0.0)", "\"hydra_hwloc_xmlfile_*\", 1e99)",
          "tests/xgpt/launch/test_process.py::"
          "test_what_mpiexec_wrote_of_the_machine_goes_once_it_is_dead"),
    Place("the folder fails", "what killed ranks leave stays", "xgpt/launch/leftovers.py",
          "    if not files:\n", "    if files is not None:\n",
          "tests/xgpt/launch/test_process.py::test_only_what_nobody_has_is_removed"),
    Place("a million lines", "a line may be as long as it likes",
          "xgpt/requests/formats.py",
          "    while raw := stream.readline(MAX_LINE_BYTES + 1):",
          "    while raw := stream.readline():",
          "tests/xgpt/core/test_workload.py::"
          "test_a_line_of_50_megabytes_costs_itself_alone"),
    Place("a million lines", "half of the ids are sorted in at once",
          "xgpt/requests/reader.py",
          "_SHARE_OF_IDS = 512, 64 ", "_SHARE_OF_IDS = 512, 1 ",
          "tests/xgpt/core/test_workload.py::"
          "test_ids_are_told_apart_in_few_bytes_each"),
    # the model's own prompts
    Place("the model's prompts", "a special token that is null is a word",
          "xrunner/checkpoint/tokenizer_copy.py",
          '"special_tokens": tokenizer.special_tokens_map,',
          '"special_tokens": {key: str(tokenizer.init_kwargs.get(key)) for key in '
          '("bos_token", "eos_token", "unk_token", "pad_token")},',
          "tests/xrunner/io/test_tokenizer_folders.py"),
    Place("the model's prompts", "a tag of templates is not known",
          "xrunner/files/tokenizer.py", "extensions=[Generation, loopcontrols]",
          "extensions=[loopcontrols]",
          "tests/xrunner/io/test_tokenizer_folders.py"),
    Place("the model's prompts", "what a template leaves out vanishes",
          "xrunner/files/tokenizer.py", "        if left_out:\n", "        if not text:\n",
          "tests/xrunner/io/test_tokenizer.py::"
          "test_what_a_template_does_not_read_is_refused_by_name"),
    Place("the model's prompts", "a run that goes on tells another date", "xgpt/app/opened_job.py",
          '.get("now") if is_begun else None', '.get("then")',
          "tests/xgpt/app/resuming/test_changed_since.py::"
          "test_a_run_that_goes_on_renders_the_prompts_of_its_beginning"),
    Place("the model's prompts", "a run goes on with other tokens", "xgpt/app/running/prepare.py",
          "prompts not in (None, spool.prompts_digest)", "not spool.prompts_digest",
          "tests/xgpt/app/resuming/test_changed_since.py::"
          "test_other_tokens_of_the_same_requests_are_refused_untouched"),
    # hostile input
    Place("a folder's code", "transformers may run it", "xrunner/checkpoint/tokenizer_copy.py",
          "folder, trust_remote_code=False", "folder, trust_remote_code=True",
          "tests/xrunner/io/test_tokenizer.py::test_code_in_a_models_folder_is_never_run"),
    Place("a folder's code", "pickles are read", "xrunner/checkpoint/tensors.py",
          "    if not may_unpickle:\n", "    if may_unpickle:\n",
          "tests/xgpt/app/test_private_runs.py::"
          "test_pickled_weights_are_refused_unless_they_are_asked_for"),
    Place("a folder's code", "a template has all of Python", "xrunner/files/tokenizer.py",
          "    from jinja2.sandbox import ImmutableSandboxedEnvironment\n",
          "    from jinja2 import Environment as ImmutableSandboxedEnvironment\n",
          "tests/xrunner/io/test_tokenizer.py::test_a_template_does_not_reach_pythons_objects"),
    Place("who listens", "ranks have every network", "xgpt/launch/isolated.py",
          "        if uses_loopback and _is_permitted():", "        if False:",
          "tests/mpi/test_listening.py::test_ranks_are_in_a_network_of_their_own", True),
    Place("who listens", "ranks listen on every interface", "xgpt/launch/isolated.py",
          "            os.environ.setdefault(name, value)",
          '            os.environ.setdefault(name, "" and value)',
          "tests/mpi/test_listening.py::"
          "test_without_such_a_network_ranks_listen_on_loopback_alone", True),
    Place("messages", "a message of other types is taken", "xrunner/comm/exchange.py",
          "strict=True, extra", "strict=False, extra",
          "tests/xrunner/transport/test_wire.py::test_what_is_none_of_ours_is_refused"),
    Place("terminals", "control characters are printed", "xgpt/core/errors.py",
          '    return _UNPRINTABLE.sub(_escaped, text.replace("\\r\\n", "\\n"))', "    return text",
          "tests/xgpt/cli/test_escapes.py"),
    Place("files and secrets", "a private run's files are everybody's",
          "xgpt/app/running/prepare.py",
          "            os.umask(PRIVATE_UMASK)", "            pass",
          "tests/xgpt/app/test_private_runs.py::"
          "test_a_private_runs_files_are_its_users_alone_and_hold_no_secret", True),

    # machines that compute otherwise
    Place("the same elsewhere", "a copy that keeps its share may run dry",
          "xrunner/rules/routing.py", "self._is_fixed * LEAST_WAITING", "0 * LEAST_WAITING",
          "tests/xrunner/engine/test_replicas.py::"
          "test_each_replica_takes_the_steps_of_its_queries_replay"),
)
