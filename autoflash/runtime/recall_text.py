"""The C text of recall: a remembered call, told from others and launched again."""

from __future__ import annotations

RECALL_TEXT = r"""
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { MOST_POINTERS = 64, MOST_CALLS = 16, ALIGNMENT = 16, INVALID_CONTEXT = 201 };
enum { NEW_OUT = -1, NEW_LSE = -2, WORKSPACE = -3 };  /* sources that are not arguments */

typedef int (*LaunchCall)(void *config, void *function, void **places, void **extra);
typedef int (*ContextCall)(void **context);

enum { CALLS, DATA_PTR, DEBUG, ENTER, EXIT, NUM_NAMES };
static PyObject *empty_like, *runtime, *names[NUM_NAMES];

typedef struct {  /* filled in at `place`: a pointer, or where the map of its tensor lies */
  Py_ssize_t place, which;
  PyObject *maps;
} Filled;

typedef struct {
  void *function, *config, **places, **stream;
  uint64_t *words;
  Filled *filled;
  Py_ssize_t num_filled;
} Step;

typedef struct {
  PyObject_HEAD
  /* from values to kept: what it holds */
  PyObject *values, *tensors, *twice, *check, *out, *lse, *workspace, *stream_of, *device, *tally,
      *last_tally, *kept;
  Py_ssize_t num_pointers, num_steps, out_at;
  int gives, busy;
  Py_ssize_t sources[MOST_POINTERS];
  uint64_t offsets[MOST_POINTERS];
  LaunchCall launch;
  ContextCall current_context;
  void *context;
  Step *steps;
} Call;

typedef struct {
  PyObject_HEAD
  Call *known[MOST_CALLS];  /* the last one first */
  Py_ssize_t count;
} Calls;

static PyTypeObject CallType;

/* Whether a profiler listens to launches, or debugging wants other kernels. */
static int heard(void) {
  for (int which = ENTER; which <= EXIT; which++) {
    PyObject *hook = PyObject_GetAttr(runtime, names[which]);
    PyObject *calls = hook ? PyObject_GetAttr(hook, names[CALLS]) : NULL;
    int none = calls && PyList_CheckExact(calls) && PyList_GET_SIZE(calls) == 0;
    Py_XDECREF(hook);
    Py_XDECREF(calls);
    if (!none) {
      PyErr_Clear();  /* a hook of another kind */
      return 1;
    }
  }
  PyObject *debug = PyObject_GetAttr(runtime, names[DEBUG]);
  int on = debug ? PyObject_IsTrue(debug) : 1;
  Py_XDECREF(debug);
  PyErr_Clear();
  return on != 0;
}

/* The value at the place that `places` has at i. */
static PyObject *at(PyObject *values, PyObject *places, Py_ssize_t i) {
  return PyTuple_GET_ITEM(values, PyLong_AsSsize_t(PyTuple_GET_ITEM(places, i)));
}

/* Whether the values are those remembered and the tensors pass the check. */
static int matches(Call *call, PyObject *values) {
  Py_ssize_t count = PyTuple_GET_SIZE(call->values);
  if (PyTuple_GET_SIZE(values) != count) return 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *mine = PyTuple_GET_ITEM(call->values, i), *given = PyTuple_GET_ITEM(values, i);
    if (mine == given || mine == Py_Ellipsis) continue;
    if (Py_TYPE(mine) != Py_TYPE(given)) return 0;
    int same = PyObject_RichCompareBool(mine, given, Py_EQ);
    if (same <= 0) return same;
  }
  for (Py_ssize_t i = 0; i + 1 < PyTuple_GET_SIZE(call->twice); i += 2)
    if (at(values, call->twice, i) != at(values, call->twice, i + 1)) return 0;
  PyObject *tensors[MOST_POINTERS];
  Py_ssize_t num_tensors = PyTuple_GET_SIZE(call->tensors);
  for (Py_ssize_t i = 0; i < num_tensors; i++) tensors[i] = at(values, call->tensors, i);
  PyObject *passed = PyObject_Vectorcall(call->check, tensors, num_tensors, NULL);
  if (!passed) return -1;
  Py_DECREF(passed);
  return passed == Py_True;
}

/* A new tensor like this one, whose values are not there; NULL for None, without an error. */
static PyObject *new_like(PyObject *like) {
  return like == Py_None ? NULL : PyObject_CallOneArg(empty_like, like);
}

static int pointer_of(PyObject *tensor, uint64_t *pointer) {
  PyObject *number = PyObject_CallMethodNoArgs(tensor, names[DATA_PTR]);
  if (!number) return -1;
  *pointer = PyLong_AsUnsignedLongLong(number);
  Py_DECREF(number);
  return PyErr_Occurred() ? -1 : 0;
}

/* Fill in what a launch is told. 1 if it is, 0 where a map is not found, -1 of an error. */
static int fill(Step *step, const uint64_t *pointers, void *stream) {
  *step->stream = stream;
  for (Py_ssize_t i = 0; i < step->num_filled; i++) {
    Filled *one = &step->filled[i];
    uint64_t pointer = pointers[one->which];
    if (one->maps == Py_None) {
      step->words[one->place] = pointer;
      continue;
    }
    PyObject *key = PyLong_FromUnsignedLongLong(pointer);
    PyObject *map = key ? PyObject_GetItem(one->maps, key) : NULL;
    Py_XDECREF(key);
    if (!map) return -1;
    step->places[one->place] = map == Py_None ? NULL : PyLong_AsVoidPtr(map);
    Py_DECREF(map);
    if (!step->places[one->place]) return PyErr_Occurred() ? -1 : 0;
  }
  return 1;
}

static int launch_all(Call *call, const uint64_t *pointers, void *stream) {
  for (Py_ssize_t i = 0; i < call->num_steps; i++) {
    int filled = fill(&call->steps[i], pointers, stream);
    if (filled <= 0) return filled;
  }
  int error = 0;
  Py_ssize_t number = 0;
  Py_BEGIN_ALLOW_THREADS
  for (; number < call->num_steps && !error; number++) {
    Step *step = &call->steps[number];
    error = call->launch(step->config, step->function, step->places, NULL);
  }
  Py_END_ALLOW_THREADS
  if (error == INVALID_CONTEXT && number == 1) return 0;
  if (!error) return 1;
  PyErr_Format(PyExc_RuntimeError, "CUDA error %d at the launch of a bound kernel", error);
  return -1;
}

static int count_call(PyObject *tally, PyObject *last_tally) {
  if (tally == Py_None) return 0;
  PyObject *calls = PyObject_GetAttr(tally, names[CALLS]);
  PyObject *more = calls ? PyLong_FromSsize_t(PyLong_AsSsize_t(calls) + 1) : NULL;
  int failed = more ? PyObject_SetAttr(tally, names[CALLS], more) : -1;
  Py_XDECREF(calls);
  Py_XDECREF(more);
  return failed ? -1 : PyList_SetItem(last_tally, 0, Py_NewRef(tally));
}

/* What the call gives, launched; NotImplemented where nothing may be launched so. */
static PyObject *run(Call *call, PyObject *values) {
  void *context = NULL;
  if (call->busy || call->current_context(&context) || context != call->context || heard())
    Py_RETURN_NOTIMPLEMENTED;
  call->busy = 1;  /* what launches are told is filled in by one thread at a time */
  PyObject *out = new_like(call->out), *lse = new_like(call->lse);
  PyObject *workspace = new_like(call->workspace), *result = NULL;
  uint64_t pointers[MOST_POINTERS], bits = 0, start = 0;
  if (PyErr_Occurred() || (workspace && pointer_of(workspace, &start))) goto done;
  if (!out && call->out_at >= 0) {
    out = PyTuple_GET_ITEM(values, call->out_at);
    Py_INCREF(out);
  }
  for (Py_ssize_t i = 0; i < call->num_pointers; i++) {
    Py_ssize_t source = call->sources[i];
    if (source == WORKSPACE)
      pointers[i] = start + call->offsets[i];
    else if (pointer_of(source == NEW_OUT   ? out
                        : source == NEW_LSE ? lse
                                            : PyTuple_GET_ITEM(values, source),
                        &pointers[i]))
      goto done;
    bits |= pointers[i];
  }
  int launched = 0;
  if (bits % ALIGNMENT == 0) {
    PyObject *stream = PyObject_CallOneArg(call->stream_of, call->device);
    if (!stream) goto done;
    void *handle = PyLong_AsVoidPtr(stream);
    Py_DECREF(stream);
    if (PyErr_Occurred()) goto done;
    launched = launch_all(call, pointers, handle);
    if (launched < 0 || (launched && count_call(call->tally, call->last_tally))) goto done;
  }
  if (!launched)
    result = Py_NewRef(Py_NotImplemented);
  else if (call->gives == 2)
    result = PyTuple_Pack(2, out, lse);
  else
    result = Py_NewRef(call->gives ? out : Py_None);
done:
  Py_XDECREF(out);
  Py_XDECREF(lse);
  Py_XDECREF(workspace);
  call->busy = 0;
  return result;
}

static PyObject *calls_launch(PyObject *self, PyObject *values) {
  Calls *calls = (Calls *)self;
  if (!PyTuple_CheckExact(values)) Py_RETURN_NOTIMPLEMENTED;
  for (Py_ssize_t i = 0; i < calls->count; i++) {
    Call *call = calls->known[i];
    Py_INCREF(call);  /* another thread may forget it */
    int same = matches(call, values);
    if (same > 0 && i && i < calls->count && calls->known[i] == call) {
      memmove(calls->known + 1, calls->known, i * sizeof(Call *));
      calls->known[0] = call;
    }
    PyObject *result = same > 0 ? run(call, values) : NULL;
    Py_DECREF(call);
    if (same) return result;
  }
  Py_RETURN_NOTIMPLEMENTED;
}

static PyObject *calls_remember(PyObject *self, PyObject *call) {
  Calls *calls = (Calls *)self;
  if (!PyObject_TypeCheck(call, &CallType)) {
    PyErr_BadArgument();
    return NULL;
  }
  for (Py_ssize_t i = 0; i < calls->count; i++)
    if ((PyObject *)calls->known[i] == call) Py_RETURN_NONE;
  Call *last = calls->count == MOST_CALLS ? calls->known[--calls->count] : NULL;
  memmove(calls->known + 1, calls->known, calls->count * sizeof(Call *));
  calls->known[0] = (Call *)Py_NewRef(call);
  calls->count++;
  Py_XDECREF(last);
  Py_RETURN_NONE;
}

static void calls_free(PyObject *self) {
  Calls *calls = (Calls *)self;
  for (Py_ssize_t i = 0; i < calls->count; i++) Py_DECREF(calls->known[i]);
  Py_TYPE(self)->tp_free(self);
}

/* A copy of the bytes, aligned as malloc does. */
static void *copied(PyObject *bytes) {
  void *copy = PyMem_Malloc(PyBytes_GET_SIZE(bytes) + 1);
  if (copy) memcpy(copy, PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes));
  return copy;
}

static int read_step(Step *step, PyObject *given) {
  PyObject *config, *words, *filled;
  unsigned long long function;
  Py_ssize_t stream_at;
  if (!PyArg_ParseTuple(given, "KSnSO!", &function, &config, &stream_at, &words, &PyTuple_Type,
                        &filled))
    return -1;
  Py_ssize_t count = PyBytes_GET_SIZE(words) / sizeof(uint64_t);
  step->function = (void *)(uintptr_t)function;
  step->config = copied(config);
  step->words = copied(words);
  step->places = PyMem_Calloc(count + 1, sizeof(void *));
  step->filled = PyMem_Calloc(PyTuple_GET_SIZE(filled) + 1, sizeof(Filled));
  if (!step->config || !step->words || !step->places || !step->filled) {
    PyErr_NoMemory();
    return -1;
  }
  step->stream = (void **)((char *)step->config + stream_at);
  for (Py_ssize_t i = 0; i < count; i++) step->places[i] = &step->words[i];
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(filled); i++) {
    Filled *one = &step->filled[i];
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(filled, i), "nnO", &one->place, &one->which,
                          &one->maps))
      return -1;
    Py_INCREF(one->maps);
    step->num_filled++;
  }
  return 0;
}

static void call_free(PyObject *self) {
  Call *call = (Call *)self;
  for (Py_ssize_t i = 0; i < call->num_steps; i++) {
    Step *step = &call->steps[i];
    for (Py_ssize_t j = 0; j < step->num_filled; j++) Py_DECREF(step->filled[j].maps);
    PyMem_Free(step->config);
    PyMem_Free(step->words);
    PyMem_Free(step->places);
    PyMem_Free(step->filled);
  }
  PyMem_Free(call->steps);
  for (PyObject **held = &call->values; held <= &call->kept; held++) Py_XDECREF(*held);
  Py_TYPE(self)->tp_free(self);
}

static PyObject *call_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  PyObject *sources, *steps;
  unsigned long long launch, current_context, context;
  Call *call = (Call *)type->tp_alloc(type, 0);
  if (!call) return NULL;
  int parsed = PyArg_ParseTuple(
      arguments, "O!O!O!OO!OOOniO!OOOOOKKK", &PyTuple_Type, &call->values, &PyTuple_Type,
      &call->tensors, &PyTuple_Type, &call->twice, &call->check, &PyTuple_Type, &sources,
      &call->out, &call->lse, &call->workspace, &call->out_at, &call->gives, &PyTuple_Type, &steps,
      &call->stream_of, &call->device, &call->tally, &call->last_tally, &call->kept, &launch,
      &current_context, &context);
  for (PyObject **held = &call->values; held <= &call->kept; held++) Py_XINCREF(*held);
  if (!parsed) goto failed;
  call->launch = (LaunchCall)(uintptr_t)launch;
  call->current_context = (ContextCall)(uintptr_t)current_context;
  call->context = (void *)(uintptr_t)context;
  call->num_pointers = PyTuple_GET_SIZE(sources);
  if (call->num_pointers > MOST_POINTERS || PyTuple_GET_SIZE(call->tensors) > MOST_POINTERS) {
    PyErr_SetString(PyExc_ValueError, "too many tensors");
    goto failed;
  }
  for (Py_ssize_t i = 0; i < call->num_pointers; i++) {
    unsigned long long offset;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(sources, i), "nK", &call->sources[i], &offset))
      goto failed;
    call->offsets[i] = offset;
  }
  call->steps = PyMem_Calloc(PyTuple_GET_SIZE(steps) + 1, sizeof(Step));
  if (!call->steps) {
    PyErr_NoMemory();
    goto failed;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); i++) {
    call->num_steps++;
    if (read_step(&call->steps[i], PyTuple_GET_ITEM(steps, i))) goto failed;
  }
  return (PyObject *)call;
failed:
  Py_DECREF(call);
  return NULL;
}

static PyObject *call_matches(PyObject *self, PyObject *values) {
  int same = PyTuple_CheckExact(values) ? matches((Call *)self, values) : 0;
  return same < 0 ? NULL : PyBool_FromLong(same);
}

static PyMethodDef call_methods[] = {{"matches", call_matches, METH_O, NULL}, {NULL}};

static PyTypeObject CallType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "autoflash_recall.Call",
    .tp_basicsize = sizeof(Call),
    .tp_dealloc = call_free,
    .tp_methods = call_methods,
    .tp_new = call_new,
};

static PyMethodDef calls_methods[] = {
    {"launch", calls_launch, METH_O, NULL},
    {"remember", calls_remember, METH_O, NULL},
    {NULL},
};

static PyTypeObject CallsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "autoflash_recall.Calls",
    .tp_basicsize = sizeof(Calls),
    .tp_dealloc = calls_free,
    .tp_methods = calls_methods,
    .tp_new = PyType_GenericNew,
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "autoflash_recall", NULL, -1, NULL};

static PyObject *attribute_of(const char *module, const char *name) {
  PyObject *imported = PyImport_ImportModule(module);
  PyObject *found = imported ? PyObject_GetAttrString(imported, name) : NULL;
  Py_XDECREF(imported);
  return found;
}

PyMODINIT_FUNC PyInit_autoflash_recall(void) {
  empty_like = attribute_of("torch", "empty_like");
  runtime = empty_like ? attribute_of("triton.knobs", "runtime") : NULL;
  const char *texts[] = {"calls", "data_ptr", "debug", "launch_enter_hook", "launch_exit_hook"};
  for (int i = 0; i < NUM_NAMES; i++) names[i] = PyUnicode_InternFromString(texts[i]);
  if (!runtime || PyType_Ready(&CallType) || PyType_Ready(&CallsType)) return NULL;
  PyObject *module = PyModule_Create(&definition);
  if (!module || PyModule_AddObjectRef(module, "Call", (PyObject *)&CallType) ||
      PyModule_AddObjectRef(module, "Calls", (PyObject *)&CallsType))
    return NULL;
  return module;
}
"""
RECALL_SOURCE = (RECALL_TEXT, "autoflash_recall")  # and the name that it has as a module
