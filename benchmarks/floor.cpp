// The least that any implementation pays: copies a nested dict and reads the .shape of each leaf.
// Not part of the package; `python -m benchmarks` builds it and compares us with it.
#include <Python.h>

static PyObject* copied(PyObject* node, PyObject* shape_name, PyObject* spec) {
    if (!PyDict_CheckExact(node)) {
        PyObject* shape = PyObject_GetAttr(node, shape_name);
        if (shape == nullptr) return nullptr;
        Py_DECREF(shape);
        return Py_NewRef(spec);
    }
    PyObject* out = PyDict_New();
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t at = 0;
    while (out != nullptr && PyDict_Next(node, &at, &key, &value)) {
        PyObject* child = copied(value, shape_name, spec);
        if (child == nullptr || PyDict_SetItem(out, key, child) < 0) Py_CLEAR(out);
        Py_XDECREF(child);
    }
    return out;
}

static PyObject* clone(PyObject*, PyObject* args) {
    PyObject *tree = nullptr, *spec = nullptr;
    if (!PyArg_ParseTuple(args, "OO", &tree, &spec)) return nullptr;
    PyObject* name = PyUnicode_InternFromString("shape");
    PyObject* out = name == nullptr ? nullptr : copied(tree, name, spec);
    Py_XDECREF(name);
    return out;
}

static PyMethodDef methods[] = {{"clone", clone, METH_VARARGS, nullptr}, {}};
static PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "floor_clone", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit_floor_clone() { return PyModule_Create(&module); }
